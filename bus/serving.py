"""Subscriptions of a service: typed calls, each in a task of its own, and plain listening.

A callback of nats-py must never await work (it runs one message at a time) and never let an exception out (a
CancelledError would end the subscription silently).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

from nats.aio.msg import Msg

from bus.log_limit import LogLimiter
from bus.subjects import is_inbox
from schemas.errors import BuswayError, CapacityError, ErrorRecord, PayloadTooLargeError, RequestError
from schemas.message import Message, decode, encode

logger = logging.getLogger(__name__)

M = TypeVar("M")
Answer = Message | ErrorRecord | bytes
NO_HEADERS: Mapping[str, str] = {}
Handler = Callable[[M, "Call"], Awaitable[Answer | None]]
ErrorAnswer = Callable[[BuswayError], Answer]


class Sender(Protocol):
    """The part of a Bus that serving needs."""

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None: ...

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]": ...


class Call:
    """One message to a service and the way back to its sender. `reply` is "" when it wants no answer, `headers` are
    as they came, whatever their case."""

    __slots__ = ("_sender", "has_responded", "headers", "reply", "subject")

    def __init__(self, sender: Sender, subject: str, reply: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.subject = subject
        self.reply = reply
        self.headers = headers
        self.has_responded = False
        self._sender = sender

    async def respond(self, answer: Answer) -> None:
        """Answer now; the handler may go on, answer again (a stream of chunks), and return None.

        Never echoes the call's headers. Raises PayloadTooLargeError, BusUnavailableError.
        """
        if self.reply:
            await self._sender.publish(self.reply, answer if isinstance(answer, bytes) else encode(answer))
            self.has_responded = True


class Serving:
    """A live subscription. `running` are the calls being handled (listeners have none); the counters are totals."""

    def __init__(self, subject: str, queue: str) -> None:
        self.subject = subject
        self.queue = queue
        self.running: set[asyncio.Task[None]] = set()
        self.num_calls = 0
        self.num_errors = 0
        self.busy_ns = 0
        self._limiter = LogLimiter()
        self._close: Callable[[], Awaitable[None]] | None = None

    def attach(self, close: Callable[[], Awaitable[None]]) -> None:
        """Note how to end the subscription."""
        self._close = close

    async def on_message(self, msg: Msg) -> None:
        """Take a message; called by nats-py."""
        raise NotImplementedError

    def warn(self, text: str) -> None:
        """Log what is wrong with messages from outside, not once a message."""
        if self._limiter.allows(text, time.monotonic()):
            logger.warning("%s: %s", self.subject, text)

    async def stop(self) -> None:
        """Take no new messages; those already received go to their handlers, running calls go on. Idempotent.

        `wait_idle` waits for the calls. Bounded to 3 s, whatever the server does.
        """
        close, self._close = self._close, None
        if close is not None:
            await close()

    async def wait_idle(self) -> None:
        """Return once no call is running (the caller's own aside)."""
        me = cast("asyncio.Task[None]", asyncio.current_task())
        while others := self.running - {me}:
            await asyncio.wait(others)


class Service(Serving, Generic[M]):
    """A serving that decodes, bounds and answers calls."""

    def __init__(
        self,
        sender: Sender,
        subject: str,
        queue: str,
        expected: type[M],
        handler: Handler[M],
        max_concurrent_calls: int,
        error_answer: ErrorAnswer = BuswayError.record,
    ) -> None:
        super().__init__(subject, queue)
        self._sender = sender
        self._expected = expected
        self._handler = handler
        self._max_concurrent_calls = max_concurrent_calls
        self._error_answer = error_answer

    async def on_message(self, msg: Msg) -> None:
        if msg.reply and not is_inbox(msg.reply):
            # Else a client could make us write anywhere: a KV key, JetStream's API, a worker.
            self.warn("call dropped: it wants its answer outside an inbox")
            return
        self.num_calls += 1
        call = Call(self._sender, msg.subject, msg.reply, msg.headers or NO_HEADERS)
        if len(self.running) < self._max_concurrent_calls:
            coro = self._run(call, msg.data)
        else:
            error = CapacityError(f"{self._max_concurrent_calls} calls in progress", retry_after_s=1.0)
            coro = self._respond(call, self._count(error))
        task = self._sender.spawn(coro, f"call {self.subject}")
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _run(self, call: Call, payload: bytes) -> None:
        started_ns = time.perf_counter_ns()
        answer = await self._handle(call, payload)
        if answer is not None:
            await self._respond(call, answer)
        self.busy_ns += time.perf_counter_ns() - started_ns

    async def _handle(self, call: Call, payload: bytes) -> Answer | None:
        try:
            return await self._handler(self._decode(payload), call)
        except BuswayError as error:
            if call.has_responded or not call.reply:  # else it is the asker's to log
                self.warn(f"call failed unheard: {error.code}: {error.message}")
            return self._count(error)
        except Exception:
            logger.exception("handler of %s failed", self.subject)
            return self._count(BuswayError("internal error"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Somebody else's cancellation leaked out of the handler; nobody has cancelled this call.
            logger.exception("handler of %s let a CancelledError out", self.subject)
            return self._count(BuswayError("internal error"))

    def _count(self, error: BuswayError) -> Answer:
        self.num_errors += 1
        return self._error_answer(error)

    def _decode(self, payload: bytes) -> M:
        if self._expected is bytes:
            return cast("M", payload)
        return decode(payload, self._expected)

    async def _respond(self, call: Call, answer: Answer) -> None:
        try:
            await call.respond(answer)
        except PayloadTooLargeError as error:
            await call.respond(self._count(error))
        except BuswayError as error:
            self.warn(f"no answer sent: {error.message}")


class Listener(Serving):
    """A serving that hands raw messages to a synchronous callback, in order."""

    def __init__(self, subject: str, queue: str, callback: Callable[[str, bytes], None]) -> None:
        super().__init__(subject, queue)
        self._callback = callback

    async def on_message(self, msg: Msg) -> None:
        # Nothing here awaits, so a CancelledError can only be the callback's own.
        self.num_calls += 1
        try:
            self._callback(msg.subject, msg.data)
        except RequestError as error:
            self.num_errors += 1
            self.warn(error.message)
        except (Exception, asyncio.CancelledError):
            self.num_errors += 1
            logger.exception("listener on %s failed", self.subject)
