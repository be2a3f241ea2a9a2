"""Orders to one worker from outside: leave, or serve in another role."""

import asyncio
from typing import Any, get_args

import msgspec

from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.scope import open_scope
from bus.subjects import AdminVerb
from deploy.errors import CommandError, UsageError
from schemas.errors import NoRespondersError
from schemas.hop import AcceptedHop, ChangeRole, Drain
from schemas.ids import WorkerId
from schemas.worker import Role

BEATS_WAIT_S = 1.2  # two heartbeats and a little
LONGEST_S = 24 * 3600.0
TAKE_ORDER_S = 3.0
ANSWER_MARGIN_S = 2.0  # a worker answers a moment after it has left the fleet


async def drain_worker(bus: Bus, worker: WorkerId, *, grace_s: float | None) -> None:
    """Return when the worker has ended everything in flight and left the fleet.

    Raises CommandError for an unknown worker, one that doesn't obey and one that dies before it is done.
    """
    await _order(bus, worker, "drain", Drain(grace_s=grace_s))


async def change_role(bus: Bus, worker: WorkerId, role: str, *, grace_s: float | None) -> None:
    """Return when the worker has ended everything in flight and serves in this role.

    Raises UsageError for a role that there isn't, CommandError as `drain_worker`.
    """
    try:
        order = ChangeRole(role=msgspec.convert(role, Role), grace_s=grace_s)
    except msgspec.ValidationError:
        raise UsageError(f"no role {role!r}: it is one of {', '.join(get_args(Role))}") from None
    await _order(bus, worker, "role", order)


async def _order(bus: Bus, worker: WorkerId, verb: AdminVerb, order: Drain | ChangeRole) -> None:
    async with watch(bus) as fleet:
        try:
            await fleet.wait_for(lambda now: worker in now.workers, timeout_s=BEATS_WAIT_S)
        except TimeoutError:
            raise CommandError(f"no live worker {worker!r} in this fleet; `busway status` lists them") from None
        async with open_scope() as scope:
            trouble: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            scope.spawn(_find_trouble(fleet, worker, trouble), "trouble with the order")
            answer = scope.spawn(_ask(bus, worker, verb, order), "order")
            either: list[asyncio.Future[Any]] = [answer, trouble]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise CommandError(trouble.result())
            answer.result()


async def _ask(bus: Bus, worker: WorkerId, verb: AdminVerb, order: Drain | ChangeRole) -> None:
    try:
        await bus.ask(bus.subjects.admin(worker, verb), order, AcceptedHop, timeout_s=LONGEST_S)
    except NoRespondersError as error:
        raise CommandError(f"{worker} does not listen any more") from error


async def _find_trouble(fleet: Fleet, worker: WorkerId, trouble: "asyncio.Future[str]") -> None:
    """Tell why no answer will come, once that is clear: the order was not taken, or the worker left without one."""
    try:
        await fleet.wait_for(lambda now: not _is_ready(now, worker), timeout_s=TAKE_ORDER_S)
    except TimeoutError:
        trouble.set_result(f"{worker} did not take the order within {TAKE_ORDER_S:.0f} s; may this NATS user give it?")
        return
    await fleet.wait_for(lambda now: worker not in now.workers, timeout_s=LONGEST_S)
    await asyncio.sleep(ANSWER_MARGIN_S)
    trouble.set_result(f"{worker} ended before it was done")


def _is_ready(fleet: Fleet, worker: WorkerId) -> bool:
    record = fleet.workers.get(worker)
    return record is not None and record.state == "ready"
