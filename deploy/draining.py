"""Draining one worker from outside."""

import asyncio

from bus.connection import Bus
from bus.discovery import Fleet, watch
from deploy.errors import CommandError
from deploy.fleet import BEATS_WAIT_S
from schemas.errors import NoRespondersError
from schemas.hop import AcceptedHop, Drain
from schemas.ids import WorkerId

LONGEST_S = 24 * 3600.0
TAKE_ORDER_S = 3.0
ANSWER_MARGIN_S = 2.0  # a worker answers a moment after it has left the fleet


async def drain_worker(bus: Bus, worker: WorkerId, *, grace_s: float | None) -> None:
    """Return when the worker has ended everything in flight and left the fleet.

    Raises CommandError for an unknown worker one that doesn't obey and one that dies before it is done.
    """
    async with watch(bus) as fleet:
        try:
            await fleet.wait_for(lambda now: worker in now.workers, timeout_s=BEATS_WAIT_S)
        except TimeoutError:
            raise CommandError(f"no live worker {worker!r} in this fleet; `busway status` lists them") from None
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(_ask(bus, worker, grace_s), name="drain")
            trouble = tasks.create_task(_trouble(fleet, worker), name="trouble with the drain")
            await asyncio.wait({answer, trouble}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                raise CommandError(trouble.result())
            trouble.cancel()


async def _ask(bus: Bus, worker: WorkerId, grace_s: float | None) -> None:
    try:
        await bus.ask(bus.subjects.admin(worker, "drain"), Drain(grace_s=grace_s), AcceptedHop, timeout_s=LONGEST_S)
    except NoRespondersError as error:
        raise CommandError(f"{worker} does not listen any more") from error


async def _trouble(fleet: Fleet, worker: WorkerId) -> str:
    """Return why no answer will come, once that is clear: the order was not taken, or the worker left without one."""
    try:
        await fleet.wait_for(lambda now: not _is_ready(now, worker), timeout_s=TAKE_ORDER_S)
    except TimeoutError:
        return f"{worker} did not take the order within {TAKE_ORDER_S:.0f} s; may this NATS user drain workers?"
    await fleet.wait_for(lambda now: worker not in now.workers, timeout_s=LONGEST_S)
    await asyncio.sleep(ANSWER_MARGIN_S)
    return f"{worker} ended before it was drained"


def _is_ready(fleet: Fleet, worker: WorkerId) -> bool:
    record = fleet.workers.get(worker)
    return record is not None and record.state == "ready"
