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
ANSWER_MARGIN_S = 2.0


async def drain_worker(bus: Bus, worker: WorkerId, *, grace_s: float | None) -> None:
    """Return when the worker has ended everything in flight and left the fleet.

    Raises CommandError for an unknown worker and for one that dies before it is done.
    """
    async with watch(bus) as fleet:
        try:
            await fleet.wait_for(lambda now: worker in now.workers, timeout_s=BEATS_WAIT_S)
        except TimeoutError:
            raise CommandError(f"no live worker {worker!r} in this fleet; `busway status` lists them") from None
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(_ask(bus, worker, grace_s), name="drain")
            death = tasks.create_task(_wait_for_death(fleet, worker), name="death watch")
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            if not answer.done():
                answer.cancel()
                raise CommandError(f"{worker} ended before it was drained")


async def _ask(bus: Bus, worker: WorkerId, grace_s: float | None) -> None:
    try:
        await bus.ask(bus.subjects.admin(worker, "drain"), Drain(grace_s=grace_s), AcceptedHop, timeout_s=LONGEST_S)
    except NoRespondersError as error:
        raise CommandError(f"{worker} does not listen any more") from error


async def _wait_for_death(fleet: Fleet, worker: WorkerId) -> None:
    """Return when the worker has left the fleet without an answer; it answers a moment after it left."""
    await fleet.wait_for(lambda now: worker not in now.workers, timeout_s=LONGEST_S)
    await asyncio.sleep(ANSWER_MARGIN_S)
