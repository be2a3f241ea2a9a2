"""What all legs of one SGLang engine share."""

import asyncio
import logging
from typing import Protocol

import msgspec

from schemas.errors import BuswayError
from schemas.hop import Ok
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.peer import Landed, Stranded
from services.engines.adapter.faults import output_fault
from services.engines.adapter.load import CountedLeg
from services.engines.adapter.site import Abortable, AdapterSite
from services.engines.sglang.rooms import RoomBook
from services.engines.sglang.thread import EngineThread
from services.engines.sglang.words import EngineSpec, Output, Submission

_log = logging.getLogger(__name__)

RETRY_GAP_S = 0.05
NUM_TELLS = 3


class Leg(Abortable, CountedLeg, Protocol):
    """One attempt on this engine."""

    attempt_id: AttemptId

    def take(self, output: Output) -> None:
        """Take what a step made of this leg's request."""
        ...

    def stranded(self, error: BuswayError) -> None:
        """The peer's leg is over with `error`."""
        ...

    def landed(self, message: Landed) -> None:
        """Prefill has delivered, and tells what it measured."""
        ...

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """A worker lives; it may be this leg's peer, and its death will be told."""
        ...

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """A worker is gone; it may be this leg's peer."""
        ...


class Site(AdapterSite[Leg], kw_only=True):
    """`by_rid` are the legs by the id that their request has in the engine; `draining` the requests that only the
    engine isn't done with yet; `peers` the live workers of the other side, whose deaths are told."""

    thread: EngineThread
    spec: EngineSpec
    lease_s: float
    rooms: RoomBook
    peers: set[tuple[WorkerId, Epoch]]
    num_outputs: int = 0
    by_rid: dict[str, Leg] = msgspec.field(default_factory=dict)
    draining: set[str] = msgspec.field(default_factory=set)

    def submit(self, leg: Leg, submission: Submission) -> None:
        """Give a leg's request to the engine."""
        self.by_rid[submission.rid] = leg
        self.thread.submit(submission)

    def abort(self, rid: str) -> None:
        """End a request, in whatever state; its outputs belong to nobody from now on."""
        if self.by_rid.pop(rid, None) is not None:
            self.draining.add(rid)
            self.thread.abort(rid)

    def take(self, output: Output) -> None:
        """Take what a step made of a request; what can't be read costs its leg alone."""
        self.num_outputs += 1
        leg = self.by_rid.get(output.rid)
        if output.is_last:
            self.by_rid.pop(output.rid, None)
            self.draining.discard(output.rid)
        if leg is None:
            return
        try:
            leg.take(output)
        except Exception as error:
            leg.abort(output_fault("SGLang", leg.attempt_id, error))

    def tell_stranded(self, worker: WorkerId, attempt_id: AttemptId, error: BuswayError) -> None:
        """Tell a peer that its leg is on its own, in the background."""
        self.spawn(self._tell(worker, Stranded(attempt_id=attempt_id, error=error.record())), "tell-stranded")

    def tell_landed(self, worker: WorkerId, message: Landed) -> None:
        """Tell decode what prefill measured, in the background."""
        self.spawn(self._tell(worker, message), "tell-landed")

    async def _tell(self, worker: WorkerId, message: Stranded | Landed) -> None:
        for _ in range(NUM_TELLS):
            try:
                await self.link.ask(worker, message, Ok)
            except BuswayError as refusal:
                _log.debug("%s wasn't told %s: %s", worker, type(message).__name__, refusal)
                await asyncio.sleep(RETRY_GAP_S)
            else:
                return
