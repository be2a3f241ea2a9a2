"""The prefill worker is killed, restarted or stopped, at every moment of its part."""

import time

import pytest

from schemas.errors import EngineError
from schemas.hop import Abort, Ok
from schemas.ids import AttemptId
from tests.faults.asking import Via
from tests.faults.stack import Stack, promptly

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
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_prefill_killed_with_the_kv_ready_and_not_fetched(stack: Stack) -> None:
    """Decode queues behind a step that doesn't end. It finds the KV gone and computes the prompts itself."""
    await stack.have(*PAIR)
    with stack["d1"].paused("after_first_token"):
        occupant = stack.ask(stack.prompt())
        await stack["d1"].hit("after_first_token")
        answers = [occupant, *stack.ask_both()]
        await stack.until_load("d1", lambda load: load.running + load.waiting == 3)
        await stack.until_load("p1", lambda load: load.kv_blocks_used == 8 and not load.queued_prefill_tokens)
        stack["p1"].kill()
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
                (await answer.over()).check_whole()
            assert bystander.longest_gap_s < promptly(0.5)
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
        await stack.bus.ask(stack.bus.subjects.worker("p1", "abort"), abort, Ok)
        if stack.handoff == "rendezvous":  # prefill still stands at its pause point
            (await answer.over()).check_whole()
            assert time.monotonic() - failed_at < promptly(1.0)
    (await answer.over()).check_whole()
    await stack.all_free()
