"""The prefill side that both handoffs share: its one result, its writes to the peer, and when its blocks are free."""

import asyncio
import time
from abc import abstractmethod

from schemas.errors import AbortedError, BuswayError, error_from
from schemas.frames import Failed, Finished, Timings
from schemas.hop import PrefillFailed, PrefillResult
from schemas.request import GenerateRequest
from services.engines.paged.desk import PromptComputed
from services.engines.paged.handoff import REMEMBER_S, HandoffSite, Leg
from services.engines.protocol import EngineEvent
from services.kv.mover import Move, Moved


class PrefillLeg(Leg):
    """A prefill leg: one PrefillResult is emitted, unless it is aborted silently before."""

    def __init__(self, site: HandoffSite, request: GenerateRequest) -> None:
        super().__init__(site, request)
        self.computed: PromptComputed | None = None
        self.computed_at = 0.0
        self._began_at = time.monotonic()
        self._moves: list[Move] = []
        self._has_result = False

    @abstractmethod
    def tell_peer(self, error: BuswayError) -> None:
        """Tell the decode leg, as far as it is known, that this one is over."""

    @abstractmethod
    def yield_to_decode(self) -> None:
        """The decode leg came to this same worker: free the blocks, whose prompt stays cached, as a success."""

    def emit_result(self, result: PrefillResult) -> None:
        """Tell the worker how the leg ended: once, and never from within a call of the worker's."""
        if not self._has_result:
            self._has_result = True
            asyncio.get_running_loop().call_soon(self.site.emit, [result])

    def free(self) -> None:
        """Close and free the blocks: at once, or where writes from them are under way when these have settled.

        Whatever still comes for this attempt is refused from now on.
        """
        self.close()
        now = time.monotonic()
        self.site.leases.revoke(self.attempt_id, now, remember_until=now + REMEMBER_S)
        unsettled = [move for move in self._moves if not move.settled.done()]
        for move in unsettled:
            move.cancel()
        self.site.desk.abort(self.attempt_id, quarantine=bool(unsettled))
        if unsettled:
            self.site.keep_until_settled(self.attempt_id, unsettled)

    def abort(self, error: BuswayError | None) -> None:
        self.free()
        if error is not None:
            self.emit_result(PrefillFailed(attempt_id=self.attempt_id, error=error.record()))
        self.tell_peer(error or AbortedError("the request was aborted"))

    def stranded(self, error: BuswayError) -> None:
        self.free()
        self.emit_result(PrefillFailed(attempt_id=self.attempt_id, error=error.record()))

    def ended(self, notice: Finished | Failed) -> EngineEvent:
        error = notice.error if isinstance(notice, Failed) else AbortedError("nothing was left to prefill").record()
        self.free()
        self._has_result = True
        self.tell_peer(error_from(error))
        return PrefillFailed(attempt_id=self.attempt_id, error=error)

    def note_computed(self, computed: PromptComputed) -> None:
        """The prompt is done."""
        self.computed, self.computed_at = computed, time.monotonic()

    def timings(self) -> Timings:
        """Return the phases of a computed prompt: all that isn't queue is prefill."""
        computed = self.computed
        if computed is None:
            return Timings()
        prefill_s = self.computed_at - self._began_at - computed.queue_s
        return Timings(prefill_queue_s=computed.queue_s, prefill_s=max(0.0, prefill_s))


async def moved(moves: list[Move]) -> int:
    """Wait for moves and return their bytes; raises what the first failed one in the list failed with."""
    results: list[Moved] = [await asyncio.shield(move.result) for move in moves]
    return sum(result.num_bytes for result in results)
