"""Clients that go away or run out of time at the turns of a handoff (the phases are test_cancellation's), read slowly,
or ask twice."""

import asyncio
import time
from collections import Counter

import pytest

from schemas.frames import TERMINAL_FRAMES, Failed, Frame, Tokens, decode_frames
from schemas.hop import AcceptedHop
from schemas.ids import new_attempt_id, new_request_id
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from tests.conftest import wait_until
from tests.faults.oracle import expected_ids
from tests.faults.slow_reader import SlowReader
from tests.faults.stack import Stack, promptly

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
FREED_S = 1.0
"""100 ms and a step are promised; the rest is for a busy machine."""


async def test_disconnect_with_the_kv_ready(stack: Stack) -> None:
    """Decode has a step that doesn't end, and takes no KV; prefill is free all the same, at once."""
    await stack.have(*PAIR)
    with stack["d1"].paused("after_first_token"):
        occupant = stack.ask(stack.prompt())
        await stack["d1"].hit("after_first_token")
        answers = stack.ask_both()
        await stack.until_load("d1", lambda load: load.running + load.waiting == 3)
        await stack.until_load("p1", lambda load: load.kv_blocks_used == 8 and not load.queued_prefill_tokens)
        for answer in answers:
            await answer.leave()
        await stack.until_load("p1", lambda load: load.kv_blocks_used == 0, promptly(FREED_S))
    (await occupant.over()).check_whole()
    await stack.all_free(promptly(FREED_S))


@pytest.mark.parametrize("point", ["before_ticket", "mid_transfer", "before_confirm"])
async def test_disconnect_during_the_handoff(stack: Stack, point: str) -> None:
    """Everything is free while the handoff still stands at its pause point: nobody waits for its end."""
    if stack.handoff == "rendezvous" and point != "mid_transfer":
        pytest.skip("a rendezvous has no ticket and no verdict")
    await stack.have(*PAIR)
    holder = stack["d1" if stack.handoff == "pull" and point != "before_ticket" else "p1"]
    with holder.paused(point):
        answers = stack.ask_both()
        await holder.hit(point, 2)
        for answer in answers:
            await answer.leave()
        await stack.all_free(promptly(FREED_S))


@pytest.mark.parametrize(
    ("name", "point", "phases"),
    [
        ("queue", "frozen", {"queue"}),
        ("prefill", "before_prefill", {"prefill"}),
        ("transfer", "mid_transfer", {"transfer", "prefill"}),
        ("first_token", "mid_transfer", {"transfer", "prefill"}),
        ("total", "after_first_token", {"total"}),
    ],
)
async def test_a_deadline_ends_the_request_in_its_phase(stack: Stack, name: str, point: str, phases: set[str]) -> None:
    await stack.have(*PAIR)
    holder = stack["d1" if point == "after_first_token" or (point, stack.handoff) == ("mid_transfer", "pull") else "p1"]
    async with holder.frozen() if point == "frozen" else holder.holding(point):
        began = time.time()
        answer = stack.ask(stack.prompt(), deadlines=Deadlines(**{name: began + 0.4}))
        (await answer.over(timeout_s=promptly(2.0))).check_failed("deadline_exceeded")
        assert 0.35 < time.time() - began < promptly(1.2)
        assert answer.phase in phases, answer.phase
        if point == "mid_transfer":
            await stack.all_free(promptly(FREED_S))
    await stack.all_free(promptly(FREED_S))


async def test_a_slow_reader_costs_nobody_else_anything(stack: Stack) -> None:
    """By HTTP the socket fills up and the gateway waits for it; by the bus the client takes nothing for a while. Both
    get everything in the end."""
    await stack.have(*PAIR, decode_ms_per_step=1)
    slow = stack.ask(stack.prompt(), 1500)
    await slow.begun()
    slow.gate.clear()
    async with SlowReader.asking(stack.url("g0"), max_tokens=3000) as reader:
        await reader.begun()
        for answer in [*stack.ask_both(300), *stack.ask_both(300)]:
            (await answer.over()).check_whole()
            assert answer.longest_gap_s < promptly(1.0)
        await stack.until_load("d1", lambda load: load.running + load.waiting == 0, 30.0)
        assert not slow.task.done()
        slow.gate.set()
        (await slow.over()).check_whole()
        assert await reader.read_all() == (3000, "length")
    await stack.all_free()


async def test_a_reader_that_stopped_reading_and_leaves_is_forgotten(stack: Stack) -> None:
    await stack.have(*PAIR, decode_ms_per_step=1)
    async with SlowReader.asking(stack.url("g0"), max_tokens=3900) as reader:
        await reader.begun()
    await stack.all_free()


async def test_a_request_delivered_twice_is_answered_once(stack: Stack) -> None:
    """To both routers, before and after its end: one stream, right, with one end."""
    await stack.have("g0", "r0", "r1", "p1", "d1")
    frames: list[Frame] = []
    subject = f"{stack.bus.inbox}.twice.s"
    serving = await stack.bus.listen(subject, lambda _, payload: frames.extend(decode_frames(payload)))
    prompt = stack.prompt()
    request = GenerateRequest(
        request_id=new_request_id(),
        attempt_id=new_attempt_id(),
        model="sim",
        token_ids=prompt,
        sampling=Sampling(seed=7, temperature=1.0),
        stop=StopConditions(max_tokens=100),
        stream=StreamAddress(subject=subject),
    )
    for _ in range(6):
        await stack.bus.ask(stack.bus.subjects.requests("sim"), request, AcceptedHop)
    await wait_until(lambda: any(isinstance(frame, TERMINAL_FRAMES) for frame in frames))
    for _ in range(3):
        await stack.bus.ask(stack.bus.subjects.requests("sim"), request, AcceptedHop)
    await stack.all_free()
    said = {
        frame.seq + at: one for frame in frames if isinstance(frame, Tokens) for at, one in enumerate(frame.token_ids)
    }
    assert [said[at] for at in range(100)] == expected_ids(prompt, 100, seed=7, temperature=1.0)
    assert Counter(type(frame).__name__ for frame in frames)["Finished"] == 1
    assert not any(isinstance(frame, Failed) for frame in frames)
    await serving.stop()


async def test_a_client_that_asks_again_while_it_is_answered_gets_two_answers(stack: Stack) -> None:
    """A retry under way is a request of its own: the same prompt, nothing mixed up."""
    await stack.have(*PAIR)
    prompt = stack.prompt()
    answers = [
        stack.ask(prompt, 60, via=via, seed=seed) for seed in (1, 2) for via in ("http", "bus") for _ in range(3)
    ]
    await asyncio.wait([answer.task for answer in answers])
    for answer in answers:
        answer.check_whole()
    await stack.all_free()
