"""A request is given up in each phase, by its client, by its deadline and by the end of its gateway: both legs are free
at once, by the workers' own counts.

Each phase is staged: the worker whose part it is stands at a pause point, or still, with the request in hand.
"""

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import pytest

from schemas.hop import Abort
from schemas.message import decode
from schemas.request import Deadlines
from tests.conftest import wait_until
from tests.faults.asking import Answer
from tests.faults.stack import Stack, promptly

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
FREED_S = 0.1
LOOKS_S = 0.05
"""What the looking takes: a pause point looks every 5 ms whether it is over, a test every 10 ms what a worker holds."""
DEADLINE_S = 1.2
"""Enough to get to any phase, and less than it takes to be taken for dead."""
DRAIN_S = 0.3
NUM_LONG, LONG = 10, 4000

Ask = Callable[[], list[Answer]]


class Staged(NamedTuple):
    """Requests that stand in a phase, and another whose worker's step makes them stand there."""

    answers: list[Answer]
    occupants: list[Answer]


Stage = Callable[[Stack, Ask], AbstractAsyncContextManager[Staged]]


@contextlib.asynccontextmanager
async def queued_at_the_router(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    """No worker has answered the router's hop."""
    async with stack["p1"].frozen():
        answers = ask()
        await _accepted(stack, answers)
        yield Staged(answers, [])


@contextlib.asynccontextmanager
async def queued_for_prefill(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    with stack["p1"].paused("before_prefill"):
        occupant = stack.ask(stack.prompt())
        await stack["p1"].hit("before_prefill")
        answers = ask()
        await stack.until_load("p1", lambda load: load.running + load.waiting == 1 + len(answers))
        yield Staged(answers, [occupant])


@contextlib.asynccontextmanager
async def prefilling(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    with stack["p1"].paused("before_prefill"):
        answers = ask()
        await stack["p1"].hit("before_prefill")
        await stack.until_load("p1", lambda load: load.running + load.waiting == len(answers))
        yield Staged(answers, [])


@contextlib.asynccontextmanager
async def kv_ready(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    """The router asks decode, which stands still. (In a rendezvous it asks while prefill computes.)"""
    async with stack["d1"].frozen():
        answers = ask()
        await stack.until_load("p1", lambda load: load.kv_blocks_used == 4 * len(answers) and not load.running)
        yield Staged(answers, [])


@contextlib.asynccontextmanager
async def transferring(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    mover = stack["d1" if stack.handoff == "pull" else "p1"]
    with mover.paused("mid_transfer"):
        answers = ask()
        await mover.hit("mid_transfer", len(answers))
        yield Staged(answers, [])


@contextlib.asynccontextmanager
async def queued_for_decode(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    """Decode has acked, and has a step that doesn't end."""
    with stack["d1"].paused("after_first_token"):
        occupant = stack.ask(stack.prompt())
        await stack["d1"].hit("after_first_token")
        answers = ask()
        await stack.until_load("d1", lambda load: load.running + load.waiting == 1 + len(answers))
        yield Staged(answers, [occupant])


@contextlib.asynccontextmanager
async def decoding(stack: Stack, ask: Ask) -> AsyncIterator[Staged]:
    answers = ask()
    for answer in answers:
        await answer.begun()
    yield Staged(answers, [])


PHASES: list[Stage] = [
    queued_at_the_router,
    queued_for_prefill,
    prefilling,
    kv_ready,
    transferring,
    queued_for_decode,
    decoding,
]
each_phase = pytest.mark.parametrize("stage", PHASES, ids=[stage.__name__ for stage in PHASES])


@each_phase
async def test_a_client_that_disconnects(stack: Stack, stage: Stage) -> None:
    await stack.have(*PAIR)
    async with stage(stack, lambda: stack.ask_both(900)) as staged:
        for answer in staged.answers:
            await answer.leave()
    await freed(stack, staged)


@each_phase
async def test_a_deadline_that_passes(stack: Stack, stage: Stage) -> None:
    """The request's own end tells the client which one it was."""
    await stack.have(*PAIR, request_timeout_s=DEADLINE_S)

    def ask() -> list[Answer]:
        deadlines = Deadlines(total=time.time() + DEADLINE_S)
        return [stack.ask(stack.prompt(), 900, via="http"), stack.ask(stack.prompt(), 900, deadlines=deadlines)]

    async with stage(stack, ask) as staged:
        for answer in staged.answers:
            (await answer.over(timeout_s=promptly(4.0))).check_failed("deadline_exceeded")
            assert answer.has_begun or answer.status == 504
    await freed(stack, staged)


@each_phase
async def test_a_gateway_that_shuts_down(stack: Stack, stage: Stage) -> None:
    """What outlasts its grace is told so, and ended."""
    await stack.have(*PAIR, gateway_drain_s=DRAIN_S)
    async with stage(stack, lambda: [stack.ask(stack.prompt(), 900, via="http") for _ in range(2)]) as staged:
        stack["g0"].signal(signal.SIGTERM)
        for answer in staged.answers:
            (await answer.over(timeout_s=promptly(4.0))).check_failed("unavailable")
            assert answer.has_begun or (answer.status == 503 and answer.retry_after)
        assert await stack["g0"].ended() == 0
    await freed(stack, staged)


async def test_ten_long_prompts_that_nobody_wants_cost_the_next_short_one_nothing(stack: Stack) -> None:
    """Ten prompts of 4,000 tokens would be 630 chunks. Of them only the one is computed that was under way."""
    await stack.have(*PAIR, max_batched_tokens=64, max_context_tokens=8000, num_blocks=4096)
    aborted: set[str] = set()
    spy = await stack.bus.listen(
        stack.bus.subjects.worker("p1", "abort"), lambda _, payload: aborted.add(decode(payload, Abort).attempt_id)
    )
    with stack["p1"].paused("before_prefill"):
        streamed = [stack.ask(stack.prompt(LONG), via=via) for via in ("http", "bus") for _ in range(3)]
        whole = [stack.ask(stack.prompt(LONG), via="http", is_streamed=False) for _ in range(NUM_LONG - len(streamed))]
        answers = [*streamed, *whole]
        under_way = await stack["p1"].hit("before_prefill")
        await stack.until_load("p1", lambda load: load.running + load.waiting == NUM_LONG)
        for answer in answers:
            await answer.leave()
        await wait_until(lambda: len(aborted) == NUM_LONG)
        await stack.load("p1")  # it has heard of them when it answers this
        short = stack.ask(stack.prompt(50), 3, via="http")
        await stack.until_load("p1", lambda load: load.running + load.waiting == NUM_LONG + 1)
    (await short.over()).check_whole()
    chunks = stack["p1"].hits("before_prefill")
    assert chunks[: len(under_way)] == under_way
    assert len(chunks) == len(under_way) + 1
    await spy.stop()
    await stack.all_free()


async def freed(stack: Stack, staged: Staged) -> None:
    """With the step under way over, both legs are free within 100 ms. Whoever made them stand goes on unharmed."""
    num_others = len(staged.occupants)
    for worker in ("p1", "d1"):
        await stack.until_load(
            worker,
            lambda load: load.running + load.waiting <= num_others and load.kv_blocks_used <= 6 * num_others,
            promptly(FREED_S + LOOKS_S),
        )
    for occupant in staged.occupants:
        (await occupant.over()).check_whole()
    await stack.all_free()


async def _accepted(stack: Stack, answers: list[Answer]) -> None:
    """Wait until a router has taken them; only the bus's clients see its word."""
    for answer in answers:
        if answer.via == "bus":
            await answer.until("accepted")
    if all(answer.via == "http" for answer in answers):
        witness = stack.ask(stack.prompt())
        await witness.until("accepted")
        await witness.leave()
