"""What all legs of one external engine share, whichever engine it is. An adapter's own Site adds what only it has."""

from typing import Generic, Protocol, TypeVar

import msgspec

from schemas.errors import BuswayError, ErrorRecord, UnavailableError, error_from
from schemas.ids import AttemptId, Epoch, WorkerId
from services.engines.adapter.load import Totals
from services.engines.adapter.tick import TickEmitter
from services.engines.paged.limits import Limits
from services.engines.protocol import PeerLink
from services.engines.tasks import Spawn


class Abortable(Protocol):
    """One attempt on this engine."""

    def abort(self, error: BuswayError | None) -> None:
        """Free everything, and tell a peer that waits; emit one terminal event when `error` is given, else nothing."""
        ...


L = TypeVar("L", bound=Abortable)
S = TypeVar("S")


class AdapterSite(msgspec.Struct, Generic[L], kw_only=True):
    """`legs` are those whose attempt is open."""

    worker: WorkerId
    epoch: Epoch
    limits: Limits
    link: PeerLink
    ticks: TickEmitter
    spawn: Spawn
    totals: Totals = msgspec.field(default_factory=Totals)
    legs: dict[AttemptId, L] = msgspec.field(default_factory=dict)

    def abort_attempt(self, attempt_id: AttemptId, error: ErrorRecord | None) -> None:
        """Abort an attempt's leg, if it is open."""
        leg = self.legs.get(attempt_id)
        if leg is not None:
            leg.abort(None if error is None else error_from(error))


def running(site: S | None) -> S:
    """Return an engine's site; raises UnavailableError before it has one."""
    if site is None:
        raise UnavailableError("the engine isn't ready")
    return site
