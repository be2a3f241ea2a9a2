"""The life of a request at its owner: who holds it, what is missing, when it goes to others. Pure: events in,
instructions out; no I/O, no clock (`now` is Unix seconds), no randomness of its own.

bus.life_table is its map. One attempt at a time: frames of earlier ones are no events here. A gap or silence first
asks the holder to send again; an attempt whose holder is gone, knows nothing of it or failed in a way that another may
not is sent anew with the ids delivered so far. Every token is delivered once, in order; the end comes once.
"""

import random
from collections.abc import Callable, Set
from typing import Literal, NamedTuple

import msgspec

from bus.attempt import Attempt
from bus.deadlines import Due, late, next_due
from bus.delivered import Delivered
from bus.life_events import (
    AbortAt,
    Acked,
    AskResend,
    CallerClosed,
    Deliver,
    End,
    Event,
    FrameCame,
    Holder,
    HolderLeft,
    Instruction,
    LossNoticed,
    NotTaken,
    Reconnected,
    ResendAgreed,
    ResendFailed,
    Send,
    TimerFired,
)
from bus.life_table import TABLE, State, Turn
from bus.patience import Patience, Quiet, Recovery
from bus.stream import Gap
from schemas.errors import (
    AckTimeoutError,
    BusUnavailableError,
    BuswayError,
    CapacityError,
    EngineError,
    KvTransferError,
    NoRespondersError,
    WorkerLostError,
    error_from,
)
from schemas.frames import Begun, Decoding, Failed, Finished, Frame, Tokens
from schemas.ids import AttemptId, WorkerId, new_attempt_id
from schemas.request import GenerateRequest

DEFAULT_PATIENCE = Patience()

_Cause = Literal["deadline", "send", "last words", "mend", "silence"]


class _Alarm(NamedTuple):
    at: float
    cause: _Cause


class Life:
    """Give it `start` once, then every event by `handle`; carry out what they return, in order.

    `new_id` names attempts and `jitter` returns [0, 1). `reconnected_at`: when the connection was last restored.
    """

    def __init__(
        self,
        request: GenerateRequest,
        now: float,
        *,
        patience: Patience = DEFAULT_PATIENCE,
        end_ids: Set[int] = frozenset(),
        reconnected_at: float = 0.0,
        new_id: Callable[[], AttemptId] = new_attempt_id,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.state: State = "new"
        self.attempt = Attempt(request)
        self._delivered = Delivered(request, end_ids)
        self._recovery = Recovery(patience, jitter)
        self._quiet = Quiet(patience, jitter, now)
        self._patience = patience
        self._reconnected_at = reconnected_at
        self._token_at = now
        self._cause: BuswayError | None = None
        self._new_id = new_id
        self._jitter = jitter

    @property
    def num_resubmits(self) -> int:
        """Attempts that replaced one that was held."""
        return self._recovery.num_resubmits

    @property
    def is_out(self) -> bool:
        """Whether the attempt is in somebody's hands, or on its way there: its frames are wanted."""
        return self.state in ("sent", "held", "streaming", "mending")

    @property
    def is_over(self) -> bool:
        return self.state == "over"

    @property
    def wake_at(self) -> float | None:
        """The moment at which TimerFired is due; frames only move it back as long as the state stays."""
        return min((alarm.at for alarm in self._alarms()), default=None)

    def start(self, now: float) -> list[Instruction]:
        """Return the first instructions."""
        due = self._due()
        if due is not None and due.at <= now:
            return self._fail(late(due))
        self._turn("send")
        return [Send(self.attempt.request)]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event; return what to do, in order."""
        match event:
            case FrameCame(frame, is_backlog):
                return self._on_frame(frame, now, is_backlog=is_backlog)
            case Acked(attempt_id, router):
                return self._on_acked(attempt_id, router, now)
            case NotTaken():
                return self._on_not_taken(event, now)
            case ResendAgreed():
                return self._on_agreed(event, now)
            case ResendFailed(attempt_id, error):
                is_mine = attempt_id == self.attempt.id and self.state == "mending"
                return self._on_no_answer(error, now) if is_mine else []
            case HolderLeft(id):
                holder = self.attempt.holder
                if self.is_out and holder is not None and holder.id == id:
                    self.attempt.lost_at = now + self._patience.last_words_s
                return []
            case LossNoticed() | Reconnected():
                return self._on_loss(event, now)
            case CallerClosed():
                return self._close() if self.state != "over" else []
            case TimerFired():
                return self._on_timer(now)

    # What the stream says.

    def _on_frame(self, frame: Frame, now: float, *, is_backlog: bool) -> list[Instruction]:
        if frame.attempt_id != self.attempt.id or not self.is_out:
            return []
        self._quiet.heard(now, is_backlog=is_backlog)
        try:
            news = self.attempt.reader.feed(frame)
        except BuswayError as error:
            return self._lose(error, now)
        match news:
            case Tokens():
                return self._on_tokens(news, now)
            case Gap(seq):
                return self._on_gap(seq, now)
            case Finished():
                return self._finish(news)
            case Failed():
                return self._on_failed(error_from(news.error), now)
            case None:
                return self._heard(())
            case Begun():
                self._delivered.begun(news)
            case Decoding():
                if refusal := self._delivered.go_on_with(is_exact=news.can_resume_exactly):
                    return self._fail(refusal)
        return self._heard((Deliver(news),))

    def _heard(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        """A sign of life without tokens: someone has the attempt, ack or not. A holder's successor spoke, maybe."""
        if self.state == "sent":
            self._turn("accepted")
        holder = self.attempt.holder
        if self.attempt.lost_at is not None and holder is not None and holder.service == "worker":
            self.attempt.lost_at = None
        return list(instructions)

    def _on_tokens(self, frame: Tokens, now: float) -> list[Instruction]:
        self._delivered.add(frame)
        self._token_at = now
        if self.state == "mending":
            if self.attempt.is_whole:
                self.attempt.mended()
                self._turn("mended")
        elif self.state != "streaming":
            self._turn("token")
        return [Deliver(frame)]

    def _on_gap(self, seq: int, now: float) -> list[Instruction]:
        attempt = self.attempt
        attempt.gap = max(seq, attempt.gap or 0)
        if self.state == "mending":
            return []
        self._turn("gap")
        if not self._quiet.is_suspect:
            return self._ask(now)
        attempt.mend_at = now + self._patience.suspect_silence_s * self._jitter()
        return []

    def _on_failed(self, error: BuswayError, now: float) -> list[Instruction]:
        """Overload is told at once while it costs the caller nothing but a wait; with a hint of 0 s another place is
        free."""
        is_overload = isinstance(error, CapacityError) and error.retry_after_s != 0.0
        if is_overload and not self._recovery.was_held and not self._delivered.has_begun:
            return self._fail(error)
        return self._lose(error, now) if error.retryable else self._fail(error)

    # What routers and holders answer.

    def _on_acked(self, attempt_id: AttemptId, router: str, now: float) -> list[Instruction]:
        attempt = self.attempt
        if attempt_id != attempt.id or self.state == "waiting":
            return [AbortAt(attempt_id, (Holder("router", router),))]
        attempt.reader.router = router
        if self.state == "over":
            return [] if attempt.reader.is_closed else [AbortAt(attempt_id, (Holder("router", router),))]
        self._quiet.heard(now, is_backlog=True)
        return self._heard(())

    def _on_not_taken(self, event: NotTaken, now: float) -> list[Instruction]:
        """Try again, unless frames say that somebody has it after all (only the ack was lost)."""
        if event.attempt_id != self.attempt.id or self.state != "sent":
            return []
        error = event.error
        is_outage = isinstance(error, BusUnavailableError) or self._is_nobody_back_yet(error, now)
        is_passing = event.is_busy or is_outage or isinstance(error, AckTimeoutError)
        is_final = not error.retryable if self._recovery.was_held else not is_passing
        if not self._recovery.refused(now, is_final=is_final, is_outage=is_outage):
            return self._fail(error if is_final or self._cause is None else self._cause)
        self._turn("not taken")
        return []

    def _on_agreed(self, event: ResendAgreed, now: float) -> list[Instruction]:
        attempt = self.attempt
        if event.attempt_id != attempt.id or self.state != "mending":
            return []
        holder = attempt.holder
        if holder is not None and holder.service == "router" and event.by != holder.id:
            attempt.reader.decode_worker = WorkerId(event.by)
            return self._ask(now)
        if attempt.is_whole:
            self._quiet.reassured(now)
            attempt.mended()
            self._turn("mended" if attempt.has_tokens else "nothing missing")
        else:
            attempt.mend_at = now + self._patience.answer_s
        return []

    def _on_no_answer(self, error: BuswayError, now: float) -> list[Instruction]:
        """Dead or ignorant is lost; a lost question is asked again; while the bus is away nobody is judged."""
        attempt = self.attempt
        if isinstance(error, BusUnavailableError) or self._is_nobody_back_yet(error, now):
            attempt.num_asks = 0
            attempt.mend_at = now + self._patience.suspect_silence_s * (1 + self._jitter())
            return []
        is_silent = isinstance(error, AckTimeoutError)
        if is_silent and attempt.num_asks < self._patience.max_asks:
            return self._ask(now)
        if is_silent or isinstance(error, NoRespondersError):
            return self._lose(WorkerLostError(f"no sign of life of its holder: {error.message}", phase="stream"), now)
        return self._lose(attempt.reader.broken(error.message), now)

    def _on_loss(self, event: LossNoticed | Reconnected, now: float) -> list[Instruction]:
        if isinstance(event, Reconnected):
            self._reconnected_at = now
            self._recovery.reconnected(now)
        self._quiet.suspect(now)
        return []

    # What time brings.

    def _on_timer(self, now: float) -> list[Instruction]:
        alarm = min(self._alarms(), default=None)
        if alarm is None or alarm.at > now:
            return []
        attempt = self.attempt
        match alarm.cause:
            case "deadline":
                due = self._due()
                return [] if due is None else self._fail(late(due))
            case "send":
                return self._send(now)
            case "last words":
                gone = attempt.holder
                return self._lose(WorkerLostError(f"{gone and gone.id} is gone", phase="stream"), now)
            case "mend":
                if attempt.num_asks < self._patience.max_asks:
                    return self._ask(now)
                return self._lose(attempt.reader.broken("what is missing didn't come"), now)
            case "silence":
                self._turn("silence")
                return self._ask(now)

    def _alarms(self) -> list[_Alarm]:
        alarms: list[_Alarm] = []
        if self.state == "over":
            return alarms
        due, attempt = self._due(), self.attempt
        if due is not None:
            alarms.append(_Alarm(due.at, "deadline"))
        if self.state == "waiting":
            alarms.append(_Alarm(self._recovery.send_at, "send"))
        if attempt.lost_at is not None and self.is_out:
            alarms.append(_Alarm(attempt.lost_at, "last words"))
        if self.state == "mending" and attempt.mend_at is not None:
            alarms.append(_Alarm(attempt.mend_at, "mend"))
        if self.state in ("held", "streaming"):
            alarms.append(_Alarm(self._quiet.ask_at, "silence"))
        return alarms

    def _due(self) -> Due | None:
        stage = "streaming" if self._delivered.has_begun else self.attempt.reader.stage
        return next_due(self.attempt.request.deadlines, stage, self._token_at)

    # What follows.

    def _is_nobody_back_yet(self, error: BuswayError, now: float) -> bool:
        return isinstance(error, NoRespondersError) and now - self._reconnected_at < self._patience.settle_s

    def _ask(self, now: float) -> list[Instruction]:
        attempt = self.attempt
        holder = attempt.holder
        if holder is None:
            return self._lose(attempt.reader.broken("nobody is known to hold it"), now)
        attempt.num_asks += 1
        attempt.mend_at = now + 2 * self._patience.answer_s
        return [AskResend(attempt.id, holder, attempt.reader.next_seq)]

    def _send(self, now: float) -> list[Instruction]:
        self.attempt = Attempt(self._delivered.next_request(self._new_id()))
        self._quiet = Quiet(self._patience, self._jitter, now)
        self._turn("send")
        is_resubmit = self._recovery.is_first_try
        return [Send(self.attempt.request, self._cause.code if self._cause is not None and is_resubmit else "")]

    def _lose(self, error: BuswayError, now: float) -> list[Instruction]:
        """The attempt is over: finish what is complete, else go on elsewhere, else end. A second engine that fails on
        the request is the last."""
        attempt, delivered = self.attempt, self._delivered
        ending = delivered.ending()
        if ending is not None:
            aborts = self._aborts()
            self._turn("finished")
            return [*aborts, Deliver(delivered.finish(attempt.id, ending, self.num_resubmits)), End()]
        # An attempt that hadn't got as far as tokens has none to its name; who goes on is asked by his Decoding frame.
        refusal = delivered.go_on_with(is_exact=attempt.reader.can_resume_exactly) if attempt.has_tokens else None
        is_poison = isinstance(error, EngineError) and isinstance(self._cause, EngineError)
        if refusal is not None or is_poison or not self._recovery.may_resubmit:
            return self._fail(refusal or error)
        delivered.avoid(*_culprits(attempt, error))
        self._cause = error
        self._recovery.lost(now)
        aborts = self._aborts()
        self._turn("lost")
        return aborts

    def _finish(self, frame: Finished) -> list[Instruction]:
        self._turn("finished")
        if self.num_resubmits:
            usage = self._delivered.usage(frame.usage, self.num_resubmits)
            frame = msgspec.structs.replace(frame, usage=usage)
        return [Deliver(frame), End()]

    def _fail(self, error: BuswayError) -> list[Instruction]:
        aborts = self._aborts()
        self._turn("failed")
        return [*aborts, End(error)]

    def _close(self) -> list[Instruction]:
        aborts = self._aborts()
        self._turn("closed")
        return aborts

    def _aborts(self) -> list[Instruction]:
        """Abort the attempt wherever it may be held; after its terminal frame nobody holds it."""
        attempt = self.attempt
        if not self.is_out or attempt.reader.is_closed:
            return []
        return [AbortAt(attempt.id, attempt.holders)]

    def _turn(self, turn: Turn) -> None:
        self.state = TABLE[self.state, turn]


def _culprits(attempt: Attempt, error: BuswayError) -> tuple[WorkerId | None, ...]:
    """Return the workers that the next attempt should avoid."""
    reader = attempt.reader
    if isinstance(error, KvTransferError):
        return reader.prefill_worker, reader.decode_worker
    if reader.decode_worker is not None:
        return (reader.decode_worker,)
    return (reader.prefill_worker,) if error.phase in (None, "prefill") else ()
