"""The client library: one end of a request, for the gateway and for any Python program alike. Step 1 of the walk.

It sends a GenerateRequest, hears its frames on this client's one stream subject, and carries out what the request's
life (bus.life) says: send, ask for a resend, send anew elsewhere, abort. Knows nothing of text, HTTP or engines.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Set
from typing import Literal

from bus.connection import Bus
from bus.flight import Flight, OnSend, Order, unheard
from bus.life import DEFAULT_PATIENCE, Life
from bus.life_events import (
    AbortAt,
    Acked,
    AskResend,
    FrameCame,
    Holder,
    HolderLeft,
    LossNoticed,
    NotTaken,
    Reconnected,
    ResendAgreed,
    ResendFailed,
    Send,
)
from bus.patience import Patience
from bus.strays import Strays
from bus.subscriptions import PENDING_MESSAGES_LIMIT
from schemas.errors import BuswayError, CapacityError
from schemas.frames import Frame, decode_frames
from schemas.hop import Abort, AcceptedHop, Busy, Resend
from schemas.ids import AttemptId, RequestId, new_attempt_id
from schemas.message import encode
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.trace_context import continued

logger = logging.getLogger(__name__)

NO_DEADLINES = Deadlines()


class Client:
    """All requests of one bus connection. `start` once, then `generate` as often as wanted.

    With `owner` (an id whose heartbeat is on the bus) holders can tell that this client died. `on_resubmit` gets the
    code of the error that cost an attempt, `on_resend` the holder that was asked.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        owner: str = "",
        ack_timeout_s: float = 1.0,
        patience: Patience = DEFAULT_PATIENCE,
        max_pending_messages: int = PENDING_MESSAGES_LIMIT,
        on_resubmit: Callable[[str], None] = lambda reason: None,
        on_resend: Callable[[str], None] = lambda holder: None,
    ) -> None:
        self._bus = bus
        self._stream = StreamAddress(subject=f"{bus.inbox}.tok.s", owner=owner)
        self._ack_timeout_s = ack_timeout_s
        self._patience = patience
        self._max_pending_messages = max_pending_messages
        self._on_resubmit = on_resubmit
        self._on_resend = on_resend
        self._flights: dict[AttemptId, Flight] = {}
        self._strays = Strays()
        self._backlog = 0
        self._reconnected_at = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    async def start(self) -> None:
        """Subscribe to this client's streams; they end with the bus."""
        await self._bus.listen(
            f"{self._bus.inbox}.tok.>",
            self._on_frames,
            on_drop=self._on_drop,
            max_pending_messages=self._max_pending_messages,
        )
        self._bus.on_reconnect(self._on_reconnect)

    async def generate(
        self,
        *,
        model: str,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        stop: StopConditions,
        request_id: RequestId,
        num_logprobs: int | None = None,
        cache_salt: str = "",
        model_digest: str = "",
        session: str = "",
        priority: int = 0,
        deadlines: Deadlines = NO_DEADLINES,
        end_ids: Set[int] = frozenset(),
        traceparent: str = "",
        on_send: OnSend = unheard,
    ) -> AsyncGenerator[list[Frame], None]:
        """Yield the frames of one completion, those that arrived together in one list; return after Finished.

        Tokens come in order, without gaps or duplicates, whatever happens to those who generate them; Accepted,
        Prefilling, Decoding and Begun at most once for each attempt. `end_ids`: ids known to end a completion beside
        the stop ids (EOS), so that one that has all its tokens needs nobody any more. `traceparent`: W3C trace context
        of the caller's span, a trace of its own by default. `on_send` gets each attempt's id as it is sent, with the
        code of the error that cost the one before it ("": none, or no router took it).

        Raises NoRespondersError when no router serves the model, CapacityError when all are busy, DeadlineError with
        its phase, what a Failed frame carries and no other attempt cured, and bus errors. Closing the generator early
        aborts the request at every holder known; use contextlib.aclosing.
        """
        request = GenerateRequest(
            request_id=request_id,
            attempt_id=new_attempt_id(),
            model=model,
            token_ids=token_ids,
            sampling=sampling,
            stop=stop,
            stream=self._stream,
            deadlines=deadlines,
            num_logprobs=num_logprobs,
            cache_salt=cache_salt,
            model_digest=model_digest,
            session=session,
            priority=priority,
            traceparent=traceparent or continued("", request_id),
        )
        life = Life(
            request,
            time.time(),
            patience=self._patience,
            end_ids=end_ids,
            reconnected_at=self._reconnected_at,
        )
        flight = Flight(life, self._carry_out, on_send)
        try:
            flight.start()
            while not flight.is_over:
                yield await flight.next_frames()
        finally:
            for order in flight.close():
                await self._abort(order.attempt_id, order.holders)
            self._flights.pop(flight.attempt_id, None)

    def holder_left(self, holder: str) -> None:
        """Tell that a service is gone for good (a Fleet's "left"): its requests go to others at once."""
        for flight in list(self._flights.values()):
            flight.handle(HolderLeft(holder))

    def _carry_out(self, flight: Flight, order: Order) -> None:
        match order:
            case Send(request, reason):
                if reason:
                    self._on_resubmit(reason)
                self._flights.pop(flight.attempt_id, None)
                self._flights[request.attempt_id] = flight
                flight.attempt_id = request.attempt_id
                flight.on_send(request.attempt_id, reason)
                flight.context.run(self._bus.spawn, self._send(flight, request), "send request")
            case AskResend():
                self._on_resend(order.holder.id)
                flight.context.run(self._bus.spawn, self._ask_resend(flight, order), "ask for a resend")
            case AbortAt(attempt_id, holders):
                flight.context.run(self._bus.spawn, self._abort(attempt_id, holders), "abort attempt")

    async def _send(self, flight: Flight, request: GenerateRequest) -> None:
        subject = self._bus.subjects.requests(request.model)
        attempt_id = request.attempt_id
        try:
            ack: AcceptedHop | Busy = await self._bus.ask(
                subject, request, AcceptedHop | Busy, timeout_s=self._ack_timeout_s
            )
        except BuswayError as error:
            flight.handle(NotTaken(attempt_id, error))
            return
        if isinstance(ack, AcceptedHop):
            flight.handle(Acked(attempt_id, ack.by))
        else:
            busy = CapacityError(f"{ack.by} is busy: {ack.reason}", retry_after_s=ack.retry_after_s)
            flight.handle(NotTaken(attempt_id, busy, is_busy=True))

    async def _ask_resend(self, flight: Flight, order: AskResend) -> None:
        attempt_id = order.attempt_id
        resend = Resend(attempt_id=attempt_id, from_seq=order.from_seq)
        subject = self._subject_of(order.holder, "resend")
        try:
            ack = await self._bus.ask(subject, resend, AcceptedHop, timeout_s=self._patience.answer_s)
        except BuswayError as error:
            flight.handle(ResendFailed(attempt_id, error))
        else:
            flight.handle(ResendAgreed(attempt_id, ack.by))

    async def _abort(self, attempt_id: AttemptId, holders: tuple[Holder, ...]) -> None:
        await self._tell(attempt_id, self._strays.tell(attempt_id, holders, time.monotonic()))

    async def _tell(self, attempt_id: AttemptId, holders: list[Holder]) -> None:
        abort = encode(Abort(attempt_id=attempt_id, reason="its owner has closed it", phase="gateway"))
        for holder in holders:
            try:
                await self._bus.publish(self._subject_of(holder, "abort"), abort)
            except BuswayError as error:
                logger.warning("abort of %s not sent: %s", attempt_id, error.message)

    def _subject_of(self, holder: Holder, verb: Literal["abort", "resend"]) -> str:
        subjects = self._bus.subjects
        return subjects.router(holder.id, verb) if holder.service == "router" else subjects.worker(holder.id, verb)

    def _on_frames(self, subject: str, payload: bytes) -> None:
        is_backlog = self._backlog > 0
        if is_backlog:
            self._backlog -= 1
        for frame in decode_frames(payload):
            flight = self._flights.get(frame.attempt_id)
            if flight is not None and (flight.life.is_out or flight.life.is_over):
                flight.handle(FrameCame(frame, is_backlog))
            elif holders := self._strays.hear(frame, time.monotonic()):
                self._bus.spawn(self._tell(frame.attempt_id, holders), "abort stray attempt")

    def _on_drop(self, num_waiting: int) -> None:
        # Any flight may have lost its last frames: the newest message is dropped, those waiting came before it.
        self._backlog = num_waiting
        for flight in list(self._flights.values()):
            flight.handle(LossNoticed())

    async def _on_reconnect(self) -> None:
        self._backlog = 0
        self._reconnected_at = time.time()
        for flight in list(self._flights.values()):
            flight.handle(Reconnected())
