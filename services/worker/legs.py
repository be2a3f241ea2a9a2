"""The counter where legs arrive and events leave: admission, acks, aborts, and which event is whose. Steps 3 and 4 of
the walk.

Everything here happens on the event loop without waiting, so that a leg is either not here at all or in the ledger
and the engine alike.
"""

import logging
import time
from collections.abc import Sequence

import msgspec

from bus.deadlines import Due, check_deadlines, late
from bus.serving import Call
from schemas.errors import (
    AbortedError,
    BuswayError,
    EngineError,
    ErrorRecord,
    StreamBrokenError,
    WorkerLostError,
)
from schemas.frames import Begun, Decoding, Failed, Finished, Prefilling, Tokens
from schemas.handoff import BootstrapEndpoint, BootstrapInfo
from schemas.hop import (
    Abort,
    AcceptedHop,
    Busy,
    DecodeRequest,
    Ok,
    PrefillDone,
    PrefillEnded,
    PrefillFailed,
    PrefillRequest,
    Resend,
)
from schemas.ids import AttemptId, new_room
from schemas.worker import RuntimeConfig
from services.engines.protocol import CacheChanged, Engine, EngineEvent
from services.log_context import log_about, logging_about, names_of
from services.phase_timings import NO_TIMINGS
from services.worker.deadline_watch import DeadlineWatch
from services.worker.ledger import Entry, Ledger
from services.worker.load import LoadReporter
from services.worker.outlet import Outlet
from services.worker.sent_frames import SentFrames, SentResults
from services.worker.stall import StallWatch

logger = logging.getLogger(__name__)


class LegDesk:
    """The attempts of one worker, between the bus and its engine."""

    def __init__(self, engine: Engine, me: RuntimeConfig, outlet: Outlet, loads: LoadReporter) -> None:
        self.is_draining = False
        self.ledger = Ledger(me.max_num_seqs + me.max_waiting)
        self.deadlines = DeadlineWatch(self.ledger, self._late)
        self.stall = StallWatch(self._stalled)
        self._engine = engine
        self._me = me
        self._outlet = outlet
        self._loads = loads
        self._sent = SentFrames()
        self._results = SentResults()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held here, leased KV included."""
        load = self._engine.load()
        return not self.ledger and load.running + load.waiting + load.num_held == 0

    async def on_prefill(self, leg: PrefillRequest, call: Call) -> AcceptedHop | Busy | None:
        """Take a prefill leg. A queue group's member makes the rendezvous itself and tells it in its ack."""
        log_about(names_of(leg.request))
        if self._is_successors(leg):
            return None
        made = None
        if leg.bootstrap is None and self._me.handoff == "rendezvous":
            made = self._bootstrap()
            leg = msgspec.structs.replace(leg, bootstrap=made)
        refusal = self._admit(leg)
        if refusal is not None:
            return refusal
        self._outlet.say(leg.request.stream.subject, Prefilling(leg.request.attempt_id, self._me.worker_id))
        return self._accepted(made)

    async def on_decode(self, leg: DecodeRequest, call: Call) -> AcceptedHop | Busy | None:
        """Take a decode leg; from its ack on this worker alone ends the request's stream."""
        log_about(names_of(leg.request))
        if self._is_successors(leg):
            return None
        refusal = self._admit(leg)
        if refusal is not None:
            return refusal
        request, me = leg.request, self._me
        self._sent.begin(request.attempt_id, request.stream.subject, len(request.resume))
        self._outlet.say(request.stream.subject, Decoding(request.attempt_id, me.worker_id, me.can_resume_exactly))
        return self._accepted(None)

    async def on_resend(self, resend: Resend, call: Call) -> AcceptedHop:
        """Send a stream's frames again, from a token on, or a prefill leg's outcome; what hasn't come yet will come.
        Raises StreamBrokenError when they aren't known here (any more)."""
        self.stall.check()
        attempt_id = resend.attempt_id
        entry = self.ledger.get(attempt_id)
        if entry is not None and entry.result_subject:
            return self._accepted(None)
        result = self._results.get(attempt_id)
        found = self._sent.since(attempt_id, resend.from_seq)
        if result is not None:
            self._outlet.tell(*result)
        elif found is not None:
            subject, frames = found
            for frame in frames:
                self._outlet.say(subject, frame)
        else:
            raise StreamBrokenError(f"{self._me.worker_id} has no token {resend.from_seq} of that attempt")
        return self._accepted(None)

    async def on_abort(self, abort: Abort, call: Call) -> Ok | None:
        """Free an attempt, or make it end with `abort.error`; one that hasn't arrived yet will be refused."""
        self.stall.check()
        entry = self.ledger.get(abort.attempt_id)
        log_about(None if entry is None else entry.names)
        logger.debug("aborted: %s", abort.reason)
        self._abort(abort.attempt_id, abort.error if entry is not None else None)
        return Ok() if call.reply else None

    def emit(self, events: Sequence[EngineEvent]) -> None:
        """Take an engine step's events to those who wait for them."""
        self.stall.check()
        now = time.time()
        for event in events:
            if isinstance(event, CacheChanged):
                if self._me.role == "prefill":  # a prompt got on, the next pass begins: routers count on that
                    self._loads.nudge()
                continue
            entry = self.ledger.get(event.attempt_id)
            if entry is not None:
                self._deliver(entry, event, now)

    def owner_left(self, owner: str) -> None:
        """The process that wanted these streams is gone."""
        for entry in self.ledger:
            if entry.owner == owner:
                self._abort(entry.attempt_id, None)

    def listener_left(self, stream_subject: str) -> None:
        """Nobody listens to these streams any more. Routers can't know: prefill legs tell them."""
        for entry in self.ledger:
            if entry.stream_subject == stream_subject:
                if entry.result_subject:
                    self._close(entry, AbortedError("nobody listens to the request's stream").record())
                self._abort(entry.attempt_id, None)

    def drop_all(self, error: BuswayError) -> None:
        """End every attempt with an error, without waiting for the engine's word."""
        for entry in self.ledger:
            self._close(entry, error.record())
            self._abort(entry.attempt_id, None)

    def engine_died(self, cause: BaseException) -> None:
        """Tell every attempt's owner what the engine can't tell any more."""
        for entry in self.ledger:
            self._close(entry, EngineError(f"the engine died: {cause}").record())

    def _is_successors(self, leg: PrefillRequest | DecodeRequest) -> bool:
        """Whether a leg is another process's, started since under this worker's id: it answers, two would be one too
        many. (One that is meant for an earlier process is taken: that one is gone.)"""
        if leg.worker_epoch is None or leg.worker_epoch <= self._me.epoch:
            return False
        logger.warning("a leg let pass: it is for a later process of worker %s", self._me.worker_id)
        return True

    def _admit(self, leg: PrefillRequest | DecodeRequest) -> AcceptedHop | Busy | None:
        """Hand a leg to the engine; return the answer when it doesn't get that far. Raises the engine's refusal."""
        self.stall.check()
        self._loads.count(leg.dispatch)
        request = leg.request
        verdict = self.ledger.judge(request.attempt_id, leg.dispatch)
        if verdict == "aborted":
            raise AbortedError("the attempt was aborted before it arrived")
        if verdict == "duplicate":
            held = self.ledger.get(request.attempt_id)
            return self._accepted(None if held is None else held.bootstrap)
        if verdict == "elsewhere":
            return AcceptedHop(by=self._me.worker_id, epoch=self._me.epoch, is_duplicate=True)
        if self.is_draining or verdict == "full":
            return Busy(by=self._me.worker_id, reason="draining" if self.is_draining else "full")
        has_kv = isinstance(leg, DecodeRequest) and leg.params is not None
        check_deadlines(request.deadlines, "decoding" if has_kv else "accepted", time.time())
        entry = self.ledger.take(leg, time.monotonic())
        try:
            if isinstance(leg, PrefillRequest):
                self._engine.prefill(leg)
            else:
                self._engine.decode(msgspec.structs.replace(leg, prefill_timings=NO_TIMINGS))
        except BaseException:
            self.ledger.refuse(request.attempt_id)
            raise
        self.deadlines.note(entry)
        logger.debug("%s leg taken, %d prompt tokens", self._me.role, len(request.token_ids))
        return None

    def _deliver(self, entry: Entry, event: EngineEvent, now: float) -> None:
        match event:
            case Tokens():
                self._outlet.say(entry.stream_subject, event)
                self._sent.note(entry.attempt_id, event)
                entry.next_seq = event.seq + len(event.token_ids)
                entry.last_token_at = now
                if entry.stage != "streaming":
                    entry.stage = "streaming"
                    entry.clock.first_token_at = entry.clock.first_token_at or time.monotonic()
                    self.deadlines.note(entry)
                return
            case Begun():
                entry.clock.first_token_at = moment = time.monotonic()
                timings = entry.clock.decoded(event.timings, moment)
                self._outlet.say(entry.stream_subject, msgspec.structs.replace(event, timings=timings))
                return
            case Finished() | Failed():
                if isinstance(event, Finished):
                    timings = entry.clock.decoded(event.timings, time.monotonic())
                    event = msgspec.structs.replace(event, timings=timings)
                self._outlet.say(entry.stream_subject, event)
                self._sent.note(entry.attempt_id, event)
                self._sent.end(entry.attempt_id, time.monotonic())
            case PrefillDone() | PrefillEnded() | PrefillFailed():
                if not isinstance(event, PrefillFailed):
                    timings = entry.clock.prefilled(event.timings, time.monotonic())
                    event = msgspec.structs.replace(event, timings=timings)
                self._outlet.tell(entry.result_subject, event)
                self._results.note(entry.result_subject, event)
        self.ledger.close(entry.attempt_id)
        self._loads.nudge()
        if logger.isEnabledFor(logging.DEBUG):
            with logging_about(entry.names):
                logger.debug("%s leg ended: %s", self._me.role, type(event).__name__)

    def _close(self, entry: Entry, error: ErrorRecord) -> None:
        event: EngineEvent = Failed(entry.attempt_id, entry.next_seq, error)
        if entry.result_subject:
            event = PrefillFailed(attempt_id=entry.attempt_id, error=error)
        self._deliver(entry, event, 0.0)

    def _abort(self, attempt_id: AttemptId, error: ErrorRecord | None) -> None:
        """With an error the attempt stays in the ledger until the engine's last event of it."""
        self.ledger.aborted(attempt_id)
        if error is None:
            self.ledger.close(attempt_id)
            self._sent.forget(attempt_id)
            self._results.forget(attempt_id)
        self._engine.abort(attempt_id, error)
        self._loads.nudge()

    def _late(self, entry: Entry, due: Due) -> None:
        self._abort(entry.attempt_id, late(due).record())

    def _stalled(self, missed_s: float) -> None:
        if not self.ledger:
            return
        logger.warning("this process stood still for %.1f s: %d attempts dropped", missed_s, len(self.ledger))
        self._outlet.discard()
        self.drop_all(WorkerLostError(f"worker {self._me.worker_id} stood still for {missed_s:.1f} s"))

    def _bootstrap(self) -> BootstrapInfo:
        return BootstrapInfo(
            prefill_worker=self._me.worker_id,
            epoch=self._me.epoch,
            room=new_room(),
            endpoint=self._me.bootstrap or BootstrapEndpoint(),
        )

    def _accepted(self, bootstrap: BootstrapInfo | None) -> AcceptedHop:
        return AcceptedHop(by=self._me.worker_id, epoch=self._me.epoch, bootstrap=bootstrap)
