"""Run the completions of one request side by side and deliver what each step adds. Step 4 of a request's walk.

A single completion is driven by the request's own task: no queue and no switch between a frame's arrival and its
write. Siblings (n > 1, several prompts) have a task each and one mailbox, so that what arrives together is still one
write. One failing sibling cancels the others; closing a generator aborts its request on the bus.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from schemas.errors import BuswayError, StreamBrokenError
from schemas.frames import Frame
from services.gateway.choice import Choice, ChoiceDelta
from services.gateway.phases import Phases

Deliver = Callable[[Sequence[ChoiceDelta]], Awaitable[None]]


class GapMeter(Protocol):
    def observe(self, gap_s: float) -> None:
        """Count one gap between two tokens of a completion."""
        ...


@dataclass(frozen=True, slots=True)
class Leg:
    """One completion: `open` sends its request and returns its frames."""

    choice: Choice
    phases: Phases
    open: Callable[[], AsyncGenerator[list[Frame], None]]


async def run_legs(legs: Sequence[Leg], deliver: Deliver, gaps: GapMeter) -> None:
    """Return when every choice is finished and delivered; raises the first failure, with all others aborted."""
    if len(legs) == 1:
        await _run(legs[0], deliver, gaps)
        return
    mailbox = _Mailbox(len(legs))
    try:
        async with asyncio.TaskGroup() as tasks:
            for leg in legs:
                tasks.create_task(_run_sibling(leg, mailbox, gaps), name=f"choice {leg.choice.index}")
            while deltas := await mailbox.take():
                await deliver(deltas)
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def _run(leg: Leg, deliver: Deliver, gaps: GapMeter) -> None:
    try:
        await _run_to_its_end(leg, deliver, gaps)
    finally:
        leg.phases.num_tokens = leg.choice.num_tokens
        leg.phases.end(perf_counter())


async def _run_to_its_end(leg: Leg, deliver: Deliver, gaps: GapMeter) -> None:
    choice, phases = leg.choice, leg.phases
    async with aclosing(leg.open()) as batches:
        async for frames in batches:
            now = perf_counter()
            last_token_at = phases.last_token_at
            phases.observe(frames, now)
            if last_token_at is not None and phases.last_token_at == now:
                gaps.observe(now - last_token_at)
            delta = choice.feed(frames)
            if choice.is_stopped_by_string:
                break
            if delta is not None:
                await deliver((delta,))
                delta = None
    # A stop string: the generator is closed, and the request aborted, before the client hears the end.
    if choice.is_stopped_by_string and delta is not None:
        await deliver((delta,))
    if choice.finish_reason is None:
        raise StreamBrokenError("the stream ended without a terminal frame", phase="stream")


async def _run_sibling(leg: Leg, mailbox: "_Mailbox", gaps: GapMeter) -> None:
    await _run(leg, mailbox.put, gaps)
    mailbox.close_one()


class _Mailbox:
    """Deltas of `num_open` siblings until the last one closes."""

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self._deltas: list[ChoiceDelta] = []
        self._news = asyncio.Event()

    async def put(self, deltas: Sequence[ChoiceDelta]) -> None:
        self._deltas.extend(deltas)
        self._news.set()

    def close_one(self) -> None:
        self._num_open -= 1
        self._news.set()

    async def take(self) -> list[ChoiceDelta]:
        """Return all that is there, waiting for the first; empty when every sibling has closed."""
        while not self._deltas and self._num_open:
            await self._news.wait()
            self._news.clear()
        deltas, self._deltas = self._deltas, []
        self._news.clear()
        return deltas


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what the client should hear of: the first of our errors, else the first of any."""
    ours = group.subgroup(BuswayError)
    found: BaseException = group if ours is None else ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
