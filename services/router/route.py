"""The way of one request through its workers: events in, instructions out. Pure: no I/O, no clock, no choice of worker.

There is one code path for both handoffs: *when the disaggregated params are known, decode is asked.* They are known
with the prefill leg's ack (rendezvous) or with its result (after prefill); aggregated requests have none and ask
decode at once. (A rendezvous could ask both in the same breath. Waiting for the ack costs a round trip that prefill
computes through anyway, and then a full or leaving prefill worker, or a prompt it refuses, never costs decode or the
request anything: the leg just goes to another.)

The router is the request's holder, and alone may send its terminal frame, until decode acks; from then on a failure is
told to decode, which ends the stream. Of a failed prefill leg it is told only where the two legs' engines don't speak
with each other over the bus: those that do (torch, sim) hear it from their peer, and may compute the prompt themselves.
A prompt may also stay on a decode worker (local_prefill.py): asked for a prefill leg, its chooser sends the decode leg
without params instead. If that worker is busy, the usual way is gone.

Whatever ends a route also aborts every leg that may still hold something.
"""

from typing import Literal

import msgspec

from bus.deadlines import Due, next_due
from bus.deadlines import Stage as RequestStage
from schemas.errors import BuswayError, ErrorRecord, WorkerLostError
from schemas.frames import Failed, Finished, Frame, Timings, Tokens, Usage
from schemas.handoff import BootstrapInfo, DisaggregatedParams, Handoff
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import Epoch, WorkerId
from schemas.request import GenerateRequest
from services.router.policies import Leg
from services.router.route_words import (
    AbortAsked,
    AbortLeg,
    Ask,
    Event,
    Instruction,
    LegAccepted,
    LegBusy,
    LegElsewhere,
    LegRefused,
    LegSent,
    LegSilent,
    RequestFailed,
    ResultLost,
    Say,
    StaysOnDecode,
    WorkerLeft,
)

Stage = Literal["routing", "handed_over", "ended"]
LegState = Literal["idle", "asked", "held", "over"]


class _Leg(msgspec.Struct):
    """`held` lasts until the leg's KV is no longer its worker's: a prefill that handed over is still held."""

    name: Leg
    state: LegState = "idle"
    worker: WorkerId | None = None
    epoch: Epoch | None = None

    def is_held_by(self, worker: WorkerId, epoch: Epoch) -> bool:
        return self.state == "held" and (self.worker, self.epoch) == (worker, epoch)


class Route:
    """One attempt's route. `handoff` None: aggregated. It outlives its request, so it keeps none of the prompt."""

    def __init__(self, request: GenerateRequest, handoff: Handoff | None) -> None:
        self.attempt_id = request.attempt_id
        self.handoff = handoff
        self._num_prompt_tokens = len(request.token_ids)
        self._num_resumed = len(request.resume)
        self._deadlines = request.deadlines
        self.stage: Stage = "routing"
        self._prefill = _Leg(name="prefill")
        self._decode = _Leg(name="decode")
        self._params: DisaggregatedParams | None = None
        self._timings = Timings()
        self._is_computed = False
        self._is_local = False
        self._early: PrefillDone | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the router has nothing more to wait for; late events are still welcome."""
        return self.stage != "routing" and "asked" not in (self._prefill.state, self._decode.state)

    @property
    def awaits_result(self) -> bool:
        """Whether only the held prefill leg's outcome lets the request go on."""
        return self.stage == "routing" and self._prefill.state == "held" and self._params is None

    def start(self) -> list[Instruction]:
        """Return the first instruction."""
        return [self._ask(self._decode if self.handoff is None else self._prefill)]

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event; return what to do, in order."""
        match event:
            case LegSent(leg, worker):
                self._leg(leg).worker = worker
                return []
            case LegAccepted():
                return self._on_accepted(event)
            case LegBusy(leg):
                return self._on_busy(self._leg(leg))
            case StaysOnDecode():
                self._prefill.state, self._decode.state, self._is_local = "idle", "asked", True
                return []
            case LegElsewhere(leg):
                return self._on_elsewhere(self._leg(leg))
            case LegRefused():
                return self._on_refused(event)
            case LegSilent(leg):
                return self._on_silent(self._leg(leg))
            case ResultLost():
                return self._on_silent(self._prefill) if self.awaits_result else []
            case PrefillDone():
                return self._on_done(event)
            case PrefillEnded():
                return self._on_ended(event)
            case PrefillFailed(error=error):
                return self._prefill_failed(error)
            case AbortAsked():
                return self._on_abort(event)
            case RequestFailed(error):
                return self._fail(error) if self.stage == "routing" else []
            case WorkerLeft(worker, epoch):
                return self._on_left(worker, epoch)

    def due(self) -> Due | None:
        """Return the deadline that the router watches now; None once decode holds the request."""
        if self.stage != "routing":
            return None
        stage: RequestStage = "accepted"
        if self._is_computed:
            stage = "decoding"
        elif self._prefill.state == "held":
            stage = "prefilling"
        return next_due(self._deadlines, stage)

    def _on_accepted(self, event: LegAccepted) -> list[Instruction]:
        leg = self._leg(event.leg)
        leg.worker, leg.epoch = event.worker, event.epoch
        if leg.state == "asked":
            leg.state = "held"
        if self.stage == "ended":
            return [] if leg.state == "over" else [AbortLeg(leg=leg.name, reason="the request has ended")]
        if leg is self._decode:
            self.stage = "handed_over"
            return []
        early, self._early = self._early, None
        return self._on_done(early) if early is not None else self._params_known(event.params)

    def _on_busy(self, leg: _Leg) -> list[Instruction]:
        if self.stage == "ended":
            leg.state = "over"
            return []
        if self._is_local:  # there is a usual way
            leg.state, self._is_local = "idle", False
            return [self._ask(self._prefill)]
        return [self._ask(leg)]

    def _on_elsewhere(self, leg: _Leg) -> list[Instruction]:
        """End without a word: the stream is the other router's to end."""
        leg.state = "over"
        self.stage = "ended"
        return self._abort_legs("another router has the request", None)

    def _on_refused(self, event: LegRefused) -> list[Instruction]:
        """A resumed completion that has all its tokens needs no prefill: decode says at once how it ended."""
        self._leg(event.leg).state = "over"
        has_ended = event.leg == "prefill" and event.error.param == "resume" and self._num_resumed > 0
        if has_ended and self.stage == "routing" and self._decode.state == "idle":
            return [self._ask(self._decode)]
        return self._fail(event.error)

    def _on_silent(self, leg: _Leg) -> list[Instruction]:
        leg.state = "over"
        lost = WorkerLostError(f"the {leg.name} worker didn't answer", phase=leg.name)
        return [AbortLeg(leg=leg.name, reason="no ack"), *self._fail(lost)]

    def _on_done(self, event: PrefillDone) -> list[Instruction]:
        if self.stage == "ended":
            return [AbortLeg(leg="prefill", reason="the request has ended")]
        if self._prefill.state == "asked":  # overtook its own ack: who sent it is known with that
            self._early = event
            return []
        self._is_computed = True
        self._timings = event.timings
        if self._params is not None:  # rendezvous: the KV is delivered
            self._prefill.state = "over"
        return self._params_known(event.params)

    def _on_ended(self, event: PrefillEnded) -> list[Instruction]:
        self._prefill.state = "over"
        if self.stage != "routing" or self._decode.state != "idle":
            return []  # in a rendezvous decode ends the request
        self.stage = "ended"
        frames = completion(event, num_prompt_tokens=self._num_prompt_tokens, num_resumed=self._num_resumed)
        return [Say(frames)]

    def _on_abort(self, event: AbortAsked) -> list[Instruction]:
        if self.stage == "routing" and event.error is not None:
            return self._fail(event.error)
        aborts = self._abort_legs(event.reason, event.error)
        self.stage = "ended"
        return aborts

    def _on_left(self, worker: WorkerId, epoch: Epoch) -> list[Instruction]:
        """A prefill that has computed after-prefill KV is decode's to judge; decode's own death is seen by the
        request's owner, and the router frees the other leg."""
        if self._decode.is_held_by(worker, epoch):
            return self._lost(self._decode)
        if self._prefill.is_held_by(worker, epoch) and not self._is_computed:
            return self._lost(self._prefill)
        return []

    def _lost(self, leg: _Leg) -> list[Instruction]:
        leg.state = "over"
        if leg is self._decode:
            self.stage = "ended"
            return self._abort_legs("the decode worker is gone", None)
        return self._prefill_failed(WorkerLostError(f"the prefill worker {leg.worker} is gone", phase="prefill"))

    def _prefill_failed(self, error: BuswayError | ErrorRecord) -> list[Instruction]:
        self._prefill.state = "over"
        return [] if self.stage == "handed_over" and _meets_over_the_bus(self._params) else self._fail(error)

    def _params_known(self, params: DisaggregatedParams | None) -> list[Instruction]:
        """The one step in which both handoffs meet."""
        if params is None or self._params is not None or self.stage != "routing":
            return []
        self._params = params
        return [self._ask(self._decode)]

    def _ask(self, leg: _Leg) -> Ask:
        leg.state, leg.worker = "asked", None
        if leg is self._prefill:
            return Ask(leg="prefill")
        return Ask(
            leg="decode",
            params=self._params,
            prefill_worker=self._prefill.worker,
            prefill_timings=self._timings,
        )

    def _fail(self, error: BuswayError | ErrorRecord) -> list[Instruction]:
        """End the request as failed: by the router's own frame, or through decode once it holds the request."""
        record = error.record() if isinstance(error, BuswayError) else error
        if self.stage == "handed_over":
            self.stage = "ended"
            return self._abort_legs(record.message, record)
        if self.stage == "ended":
            return []
        self.stage = "ended"
        failed = Failed(attempt_id=self.attempt_id, seq=self._num_resumed, error=record)
        return [Say([failed]), *self._abort_legs(record.message, None)]

    def _leg(self, name: Leg) -> _Leg:
        return self._prefill if name == "prefill" else self._decode

    def _abort_legs(self, reason: str, error: ErrorRecord | None) -> list[Instruction]:
        legs = [leg for leg in (self._prefill, self._decode) if leg.state in ("asked", "held")]
        return [AbortLeg(leg=leg.name, reason=reason, error=error if leg is self._decode else None) for leg in legs]


def _meets_over_the_bus(params: DisaggregatedParams | None) -> bool:
    """Return whether the decode leg hears from its prefill leg by itself."""
    return isinstance(params, BootstrapInfo) and not params.endpoint.host


def completion(event: PrefillEnded, *, num_prompt_tokens: int, num_resumed: int) -> list[Frame]:
    """Return the frames of a request that its first token ended, or that had ended when it was resumed."""
    num_tokens = num_resumed if event.is_delivered else num_resumed + 1
    usage = Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        cached_tokens=event.num_cached_tokens,
    )
    logprobs = None if event.logprobs is None else (event.logprobs,)
    finished = Finished(
        attempt_id=event.attempt_id,
        seq=num_tokens,
        reason=event.reason,
        usage=usage,
        timings=event.timings,
    )
    if event.is_delivered:
        return [finished]
    token_ids = (event.token_id,)
    return [Tokens(attempt_id=event.attempt_id, seq=num_resumed, token_ids=token_ids, logprobs=logprobs), finished]
