"""Draining one worker from outside."""

from bus.connection import Bus
from deploy.errors import CommandError
from schemas.errors import NoRespondersError
from schemas.hop import AcceptedHop, Drain, Ok

LONGEST_S = 24 * 3600.0
ANSWER_MARGIN_S = 5.0


async def drain_worker(bus: Bus, worker: str, *, grace_s: float | None) -> None:
    """Return when the worker has ended everything in flight and left; raises CommandError for an unknown worker."""
    timeout_s = LONGEST_S if grace_s is None else grace_s + ANSWER_MARGIN_S
    try:
        await bus.ask(
            bus.subjects.admin(worker, "drain"), Drain(grace_s=grace_s), AcceptedHop | Ok, timeout_s=timeout_s
        )
    except NoRespondersError as error:
        raise CommandError(f"no worker {worker!r} in this fleet; `busway status` lists them") from error
