"""The client library: one end of a request, for the gateway and for any Python program alike. Step 1 of the walk.

It sends a GenerateRequest, hears its frames on this client's one stream subject, supervises its deadlines, and aborts
it wherever it is held when the caller loses interest. Knows nothing of text, HTTP or engines.

An attempt whose ack doesn't come in time is closed and sent again under a new id; whoever still speaks up for the old
one is answered by an abort. bus.flight says when silence ends a stream.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator

import msgspec

from bus.connection import Bus
from bus.deadlines import check_deadlines, next_due
from bus.flight import Flight, Patience
from bus.subscriptions import PENDING_MESSAGES_LIMIT
from schemas.errors import AckTimeoutError, BusUnavailableError, BuswayError, CapacityError
from schemas.frames import Accepted, Decoding, Frame, Prefilling, decode_frames
from schemas.hop import Abort, AcceptedHop, Busy
from schemas.ids import AttemptId, RequestId, new_attempt_id
from schemas.message import encode
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress

logger = logging.getLogger(__name__)

NO_DEADLINES = Deadlines()
DEFAULT_PATIENCE = Patience()
BUSY_BACKOFF_S = 0.05
MAX_ABORTED_REMEMBERED = 4096


class Client:
    """All requests of one bus connection. `start` once, then `generate` as often as wanted.

    With `owner` (an id whose heartbeat is on the bus) holders can tell that this client died.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        owner: str = "",
        ack_timeout_s: float = 1.0,
        max_tries: int = 3,
        patience: Patience = DEFAULT_PATIENCE,
        max_pending_messages: int = PENDING_MESSAGES_LIMIT,
    ) -> None:
        self._bus = bus
        self._stream = StreamAddress(subject=f"{bus.inbox}.tok.s", owner=owner)
        self._ack_timeout_s = ack_timeout_s
        self._max_tries = max_tries
        self._patience = patience
        self._max_pending_messages = max_pending_messages
        self._flights: dict[AttemptId, Flight] = {}
        self._aborted: OrderedDict[tuple[AttemptId, str], None] = OrderedDict()
        self._backlog = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    async def start(self) -> None:
        """Subscribe to this client's streams; they end with the bus."""
        await self._bus.listen(
            f"{self._bus.inbox}.tok.>",
            self._on_frames,
            on_drop=self._suspect,
            max_pending_messages=self._max_pending_messages,
        )
        self._bus.on_reconnect(self._reconnected)

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
        priority: int = 0,
        deadlines: Deadlines = NO_DEADLINES,
        traceparent: str = "",
    ) -> AsyncGenerator[list[Frame], None]:
        """Yield the frames of one completion, those that arrived together in one list; return after Finished.

        The frames are in order, without gaps or duplicates: Accepted, Prefilling, Decoding (each at most once),
        Tokens, Finished. Raises NoRespondersError when no router serves the model, CapacityError when all are busy,
        DeadlineError with its phase, StreamBrokenError, what a Failed frame carries, and bus errors. Closing the
        generator early aborts the request at every holder known; use contextlib.aclosing.
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
            priority=priority,
            traceparent=traceparent,
        )
        flight = await self._dispatch(request)
        try:
            while not flight.is_over:
                yield await flight.next_frames()
        finally:
            await self._close(flight)

    def holder_left(self, holder: str) -> None:
        """Tell that a service is gone for good (a Fleet's "left"): what only it could go on with ends in an error."""
        for flight in self._flights.values():
            flight.holder_left(holder)

    async def _dispatch(self, request: GenerateRequest) -> Flight:
        subject = self._bus.subjects.requests(request.model)
        for number in range(1, self._max_tries + 1):
            check_deadlines(request.deadlines, "sent", time.time())
            flight = self._flights[request.attempt_id] = Flight(request, self._patience)
            is_taken = False
            try:
                is_taken = await self._send(subject, flight, is_last=number == self._max_tries)
            finally:
                if not is_taken:
                    await self._close(flight)
            if is_taken:
                return flight
            request = msgspec.structs.replace(request, attempt_id=new_attempt_id())
        raise AssertionError("the last try either succeeds or raises")

    async def _send(self, subject: str, flight: Flight, *, is_last: bool) -> bool:
        """Return whether a router took the attempt; False asks for another try."""
        request = flight.request
        due = next_due(request.deadlines, "sent")
        timeout_s = self._ack_timeout_s if due is None else min(self._ack_timeout_s, max(0.001, due.at - time.time()))
        try:
            ack: AcceptedHop | Busy = await self._bus.ask(subject, request, AcceptedHop | Busy, timeout_s=timeout_s)
        except (AckTimeoutError, BusUnavailableError):
            if flight.has_heard:
                return True  # the ack was lost, the request wasn't
            if is_last:
                check_deadlines(request.deadlines, "sent", time.time())
                raise
            return False
        if isinstance(ack, AcceptedHop):
            flight.reader.router = ack.by
            return True
        if is_last:
            raise CapacityError(f"{ack.by} is busy: {ack.reason}", retry_after_s=ack.retry_after_s)
        await asyncio.sleep(BUSY_BACKOFF_S * random.uniform(0.5, 1.5))
        return False

    async def _close(self, flight: Flight) -> None:
        flight.disarm()
        del self._flights[flight.request.attempt_id]
        if not flight.has_terminal:
            attempt_id = flight.request.attempt_id
            if flight.reader.router is not None:
                await self._abort(attempt_id, self._bus.subjects.router(flight.reader.router, "abort"))
            for worker in flight.workers:
                await self._abort(attempt_id, self._bus.subjects.worker(worker, "abort"))

    async def _abort(self, attempt_id: AttemptId, subject: str) -> None:
        if (attempt_id, subject) in self._aborted:
            return
        self._aborted[attempt_id, subject] = None
        if len(self._aborted) > MAX_ABORTED_REMEMBERED:
            self._aborted.popitem(last=False)
        abort = Abort(attempt_id=attempt_id, reason="its owner has closed it", phase="gateway")
        try:
            await self._bus.publish(subject, encode(abort))
        except BuswayError as error:
            logger.warning("abort of %s not sent: %s", attempt_id, error.message)

    def _on_frames(self, subject: str, payload: bytes) -> None:
        is_backlog = self._backlog > 0
        if is_backlog:
            self._backlog -= 1
        for frame in decode_frames(payload):
            flight = self._flights.get(frame.attempt_id)
            if flight is not None:
                flight.feed(frame, is_backlog=is_backlog)
            else:
                self._stray(frame)

    def _stray(self, frame: Frame) -> None:
        # Closed or never ours: whoever says that it holds the attempt is told to let go, once.
        match frame:
            case Accepted():
                subject = self._bus.subjects.router(frame.router, "abort")
            case Prefilling() | Decoding():
                subject = self._bus.subjects.worker(frame.worker, "abort")
            case _:
                return
        self._bus.spawn(self._abort(frame.attempt_id, subject), "abort stray attempt")

    def _suspect(self, num_waiting: int) -> None:
        # Any flight may have lost its last frames: the newest message is dropped, those waiting came before it.
        self._backlog = num_waiting
        for flight in self._flights.values():
            flight.suspect()

    async def _reconnected(self) -> None:
        self._suspect(0)
