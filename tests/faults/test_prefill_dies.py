"""The prefill worker is killed, restarted or stopped, at every moment of its part."""

import time

import pytest

from schemas.errors import EngineError
from schemas.hop import Abort
from schemas.ids import AttemptId
from schemas.message import encode
from tests.faults.asking import RESUMES, Via
from tests.faults.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")


async def test_prefill_killed_while_computing(stack: Stack) -> None:
    await stack.have(*PAIR)
    with stack["p1"].paused("before_prefill"):
        answers = stack.ask_both()
        await stack["p1"].hit("before_prefill")
        await answers[1].until("prefilling")
        stack["p1"].kill()
    for answer in answers:
        (await answer.over()).check_went_on()
    await stack.all_free()


async def test_prefill_killed_with_the_kv_ready_and_not_fetched(stack: Stack) -> None:
    """Decode queues: it has no slot to fetch the KV into. It finds the KV gone and computes the prompt itself."""
    await stack.have(*PAIR, max_num_seqs=2)
    occupants = [stack.ask(stack.prompt(), 3000) for _ in range(2)]
    for occupant in occupants:
        await occupant.begun()
    answers = stack.ask_both()
    await answers[1].until("decoding")
    await stack.until_load("p1", lambda load: load.kv_blocks_used == 8 and not load.queued_prefill_tokens)
    stack["p1"].kill()
    for occupant in occupants:
        await occupant.leave()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_prefill_killed_during_the_transfer(stack: Stack) -> None:
    await stack.have(*PAIR)
    mover = stack["d1" if stack.handoff == "pull" else "p1"]
    with mover.paused("mid_transfer"):
        answers = stack.ask_both()
        await mover.hit("mid_transfer", 2)
        stack["p1"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_prefill_restarted_on_the_same_address(stack: Stack) -> None:
    """Before anybody noticed that it was gone: the new one knows nothing, and nobody takes it for the old one."""
    await stack.have(*PAIR)
    mover = stack["d1" if stack.handoff == "pull" else "p1"]
    with mover.paused("mid_transfer"):
        answers = stack.ask_both()
        await mover.hit("mid_transfer", 2)
        stack["p1"].kill()
        stack.start("p1")
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.settled(PAIR)
    again = await stack.ask(stack.prompt(), 10).over()
    again.check_whole()
    assert again.holders[1:] == ["p1", "d1"]
    assert (await stack.load("d1")).num_recomputed_tokens > 0


async def test_a_stopped_prefill_worker_costs_its_own_requests_only(stack: Stack) -> None:
    await stack.have(*PAIR)
    bystander = stack.ask(stack.prompt(), 800)
    await bystander.begun()
    with stack["p1"].paused("before_prefill"):
        answers = stack.ask_both()
        await stack["p1"].hit("before_prefill")
        async with stack["p1"].frozen():
            for answer in answers:
                (await answer.over()).check_went_on()
            assert bystander.longest_gap_s < 0.5
    (await bystander.over()).check_whole()
    await stack.settled(PAIR)


async def test_a_prefill_worker_stopped_during_the_transfer_and_woken(stack: Stack) -> None:
    """What it could still write to stays untouched until it has woken up and said that it won't."""
    await stack.have(*PAIR)
    mover = stack["d1" if stack.handoff == "pull" else "p1"]
    with mover.paused("mid_transfer"):
        answers = stack.ask_both()
        await mover.hit("mid_transfer", 2)
        async with stack["p1"].frozen():
            for answer in answers:
                (await answer.over()).check_whole()
    await stack.settled(PAIR)


@pytest.mark.parametrize("via", ["http", "bus"])
async def test_a_background_prefill_that_fails_is_known_within_a_second(stack: Stack, via: Via) -> None:
    await stack.have(*PAIR)
    with stack["p1"].paused("before_prefill"):
        answer = stack.ask(stack.prompt(), via=via)
        (attempt,) = await stack["p1"].hit("before_prefill")
        if stack.handoff == "rendezvous":
            await stack.until_load("d1", lambda load: load.running == 1)
        failed_at = time.monotonic()
        error = EngineError("the prompt broke the engine", phase="prefill").record()
        abort = Abort(attempt_id=AttemptId(attempt), reason="failed", error=error)
        await stack.bus.publish(stack.bus.subjects.worker("p1", "abort"), encode(abort))
        if not RESUMES or stack.handoff == "rendezvous":
            (await answer.over()).check_went_on()
            assert time.monotonic() - failed_at < 1.0
    (await answer.over()).check_went_on()
    await stack.all_free()
