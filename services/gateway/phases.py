"""Where a request's time went: the gateway's own clock around what router and workers report. Pure: `now` is passed in.

The gateway's interval from sending an attempt to hearing its first token is the whole. What others report of it are
their own durations, which never overlap; what nobody reports was spent on the bus, and counts as queue up to the
router's word, as first token from there on. So the phases add up, and no two clocks are ever compared.
"""

from collections.abc import Sequence

from msgspec import structs

from schemas.frames import Accepted, Begun, Decoding, Finished, Frame, Prefilling, Timings, Tokens
from schemas.ids import AttemptId, WorkerId
from schemas.trace import AttemptTrace, CompletionTrace, PhaseSeconds, Reached
from services.phase_timings import NO_TIMINGS, fitted, waited_for


class AttemptPhases:
    """One attempt as its owner hears of it. Times are monotonic seconds, None: not reached. `ended_by`: the code of
    the error that cost it."""

    __slots__ = (
        "accepted_at",
        "decode_worker",
        "ended_at",
        "ended_by",
        "first_token_at",
        "id",
        "prefill_worker",
        "router",
        "sent_at",
        "timings",
    )

    def __init__(self, id: AttemptId, sent_at: float) -> None:
        self.id = id
        self.sent_at = sent_at
        self.accepted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.ended_by = ""
        self.router = ""
        self.prefill_worker = WorkerId("")
        self.decode_worker = WorkerId("")
        self.timings: Timings | None = None

    @property
    def reached(self) -> Reached:
        """How far it got."""
        if self.first_token_at is not None:
            return "streaming"
        if self.decode_worker:
            return "decoding"
        if self.prefill_worker:
            return "prefilling"
        return "accepted" if self.accepted_at is not None else "sent"

    def until_first_token(self, now: float) -> PhaseSeconds:
        """Return the phases from sending to the first token; of an attempt that brought none, up to `now`."""
        if self.first_token_at is None or self.timings is None:
            until = now if self.first_token_at is None else self.first_token_at
            queue_s = (until if self.accepted_at is None else self.accepted_at) - self.sent_at
            return PhaseSeconds(queue_s=queue_s, unreported_s=until - self.sent_at - queue_s)
        whole_s = self.first_token_at - self.sent_at
        told = fitted(self.timings, whole_s)
        on_bus_s = whole_s - waited_for(told)
        queue_s = min(max(0.0, on_bus_s), (self.accepted_at or self.sent_at) - self.sent_at)
        return PhaseSeconds(
            queue_s=queue_s,
            route_s=told.route_s,
            prefill_queue_s=told.prefill_queue_s,
            prefill_s=told.prefill_s,
            decode_queue_s=told.decode_queue_s,
            transfer_s=told.transfer_s,
            first_token_s=told.first_token_s + max(0.0, on_bus_s - queue_s),
        )

    def trace(self, received_at: float, now: float) -> AttemptTrace:
        """Return the attempt for who asks; `now` is the end of one that has not ended."""
        ended_at = now if self.ended_at is None else self.ended_at
        decode_s = 0.0 if self.first_token_at is None else ended_at - self.first_token_at
        return AttemptTrace(
            attempt_id=self.id,
            sent_s=self.sent_at - received_at,
            reached=self.reached,
            phases=structs.replace(self.until_first_token(ended_at), decode_s=decode_s),
            total_s=ended_at - self.sent_at,
            router=self.router,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            ended_by=self.ended_by,
        )


class Phases:
    """One completion's phases over all its attempts. `last_token_at` is for whoever measures gaps."""

    __slots__ = (
        "_attempts",
        "_ended_at",
        "first_token_at",
        "index",
        "last_token_at",
        "num_computed_prompt_tokens",
        "num_resubmits",
        "num_tokens",
        "received_at",
    )

    def __init__(self, received_at: float, index: int = 0) -> None:
        self.received_at = received_at
        self.index = index
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_tokens = 0
        self.num_computed_prompt_tokens: int | None = None
        self.num_resubmits: int | None = None
        self._attempts: list[AttemptPhases] = []
        self._ended_at: float | None = None

    @property
    def attempt_id(self) -> str:
        """The attempt sent last ("": none)."""
        return self._attempts[-1].id if self._attempts else ""

    @property
    def router(self) -> str:
        """Who routed it ("": nobody took it)."""
        return self._attempts[-1].router if self._attempts else ""

    def sent(self, attempt_id: AttemptId, reason: str, now: float) -> None:
        """An attempt goes out; the one before it was lost for this reason, or taken by nobody ("")."""
        if self._attempts:
            before = self._attempts[-1]
            before.ended_at, before.ended_by = now, reason or "not_taken"
        self._attempts.append(AttemptPhases(attempt_id, now))

    def observe(self, frames: Sequence[Frame], now: float) -> None:
        """Note what these frames tell, which arrived at `now`."""
        for frame in frames:
            match frame:
                case Tokens():
                    self.last_token_at = now
                    if self._attempts[-1].first_token_at is None:
                        self._first_token(frame.attempt_id, now)
                case Accepted():
                    attempt = self._attempt(frame.attempt_id)
                    attempt.accepted_at, attempt.router = now, frame.router
                case Prefilling():
                    self._attempt(frame.attempt_id).prefill_worker = frame.worker
                case Decoding():
                    self._attempt(frame.attempt_id).decode_worker = frame.worker
                case Begun():
                    self._attempt(frame.attempt_id).timings = frame.timings
                case Finished():
                    if frame.timings != NO_TIMINGS:  # else its owner made it: only the end was lost
                        self._attempt(frame.attempt_id).timings = frame.timings
                    self.num_computed_prompt_tokens = frame.usage.num_computed_prompt_tokens
                    self.num_resubmits = frame.usage.num_resubmits

    def end(self, now: float) -> None:
        """The completion is over, well or not; only the first word counts."""
        if self._ended_at is None:
            self._ended_at = now
            if self._attempts:
                self._attempts[-1].ended_at = now

    def seconds(self, now: float) -> PhaseSeconds:
        """Return the phases from the request's arrival to the completion's end (`now` while it has none): those of the
        attempt that brought the first token, those before it as `retry_s`, those after it as part of `decode_s`."""
        until = now if self._ended_at is None else self._ended_at
        if not self._attempts:
            return PhaseSeconds(gateway_s=until - self.received_at)
        first = self._attempts[0]
        told = next((one for one in self._attempts if one.first_token_at is not None), self._attempts[-1])
        return structs.replace(
            told.until_first_token(until),
            gateway_s=first.sent_at - self.received_at,
            retry_s=told.sent_at - first.sent_at,
            decode_s=0.0 if told.first_token_at is None else until - told.first_token_at,
        )

    def has_attempt(self, id: str) -> bool:
        """Whether one of its attempts goes by this id."""
        return any(one.id == id for one in self._attempts)

    def trace(self, now: float) -> CompletionTrace:
        """Return all of it for who asks."""
        until = now if self._ended_at is None else self._ended_at
        timings = self._timings()
        return CompletionTrace(
            index=self.index,
            phases=self.seconds(now),
            total_s=until - self.received_at,
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.received_at,
            num_tokens=self.num_tokens,
            kv_bytes=timings.kv_bytes,
            overlap_s=timings.overlap_s,
            attempts=tuple(one.trace(self.received_at, until) for one in self._attempts),
        )

    def render(self, now: float) -> dict[str, object]:
        """Return the `busway` object: seconds per phase and their sums, KV bytes moved, and who held the request."""
        phases = {name: round(seconds, 6) for name, seconds in structs.asdict(self.seconds(now)).items()}
        total_s = sum(phases.values())
        last, timings = self._attempts[-1], self._timings()
        return {
            **phases,
            "ttft_s": round(total_s - phases["decode_s"], 6),
            "total_s": round(total_s, 6),
            "overlap_s": round(timings.overlap_s, 6),
            "kv_bytes": timings.kv_bytes,
            "num_computed_prompt_tokens": self.num_computed_prompt_tokens,
            "num_resubmits": self.num_resubmits,
            "router": last.router,
            "prefill_worker": last.prefill_worker,
            "decode_worker": last.decode_worker,
        }

    def _first_token(self, attempt_id: AttemptId, now: float) -> None:
        attempt = self._attempt(attempt_id)
        attempt.first_token_at = attempt.first_token_at or now
        self.first_token_at = self.first_token_at or now

    def _attempt(self, attempt_id: AttemptId) -> AttemptPhases:
        """Return an attempt by its id; a slow reader may hear of one after the next was sent."""
        return next((one for one in reversed(self._attempts) if one.id == attempt_id), self._attempts[-1])

    def _timings(self) -> Timings:
        return next((one.timings for one in self._attempts if one.timings is not None), NO_TIMINGS)
