"""Subscriptions of a service: typed calls, each in a task of its own, and plain listening.

A callback of nats-py must never await work (it runs one message at a time) and never let an exception out (a
CancelledError would end the subscription silently).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.subjects import is_inbox
from schemas.errors import BuswayError, CapacityError, ErrorRecord, PayloadTooLargeError, RequestError
from schemas.message import Message, decode, encode

if TYPE_CHECKING:
    from bus.connection import Bus

logger = logging.getLogger(__name__)

M = TypeVar("M")
Answer = Message | ErrorRecord | bytes
STOP_TIMEOUT_S = 5.0


class Call:
    """One message to a service and the way back to its sender. `reply` is "" when it wants no answer."""

    __slots__ = ("_bus", "has_responded", "reply", "subject")

    def __init__(self, bus: "Bus", subject: str, reply: str) -> None:
        self.subject = subject
        self.reply = reply
        self.has_responded = False
        self._bus = bus

    async def respond(self, answer: Answer) -> None:
        """Answer now; the handler may go on, answer again (a stream of chunks), and return None.

        Never echoes the call's headers. Raises PayloadTooLargeError, BusUnavailableError.
        """
        if self.reply:
            await self._bus.publish(self.reply, answer if isinstance(answer, bytes) else encode(answer))
            self.has_responded = True


class Serving:
    """A live subscription. `running` are the calls being handled (listeners have none)."""

    def __init__(self, bus: "Bus", subject: str) -> None:
        self.subject = subject
        self.running: set[asyncio.Task[None]] = set()
        self._bus = bus
        self._subscription: Subscription | None = None

    def attach(self, subscription: Subscription) -> None:
        """Bind the NATS subscription that feeds this."""
        self._subscription = subscription

    async def stop(self) -> None:
        """Take no new messages; those already received go to their handlers, running calls go on. Idempotent.

        `wait_idle` waits for the calls. Bounded to 5 s, whatever the server does.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._bus.forget(self, subscription)
            await self._bus.drain_subscription(subscription)

    async def wait_idle(self) -> None:
        """Return once no call is running (the caller's own aside)."""
        me = cast("asyncio.Task[None]", asyncio.current_task())
        while others := self.running - {me}:
            await asyncio.wait(others)


class Service(Serving, Generic[M]):
    """A serving that decodes, bounds and answers calls."""

    def __init__(
        self,
        bus: "Bus",
        subject: str,
        expected: type[M],
        handler: Callable[[M, Call], Awaitable[Answer | None]],
        max_concurrent_calls: int,
    ) -> None:
        super().__init__(bus, subject)
        self._expected = expected
        self._handler = handler
        self._max_concurrent_calls = max_concurrent_calls

    async def on_message(self, msg: Msg) -> None:
        """Start a task for a call; called by nats-py."""
        if msg.reply and not is_inbox(msg.reply):
            logger.warning("call on %s dropped: it wants its answer at %r, which is no inbox", msg.subject, msg.reply)
            return
        call = Call(self._bus, msg.subject, msg.reply)
        if len(self.running) >= self._max_concurrent_calls:
            record = CapacityError(f"{self._max_concurrent_calls} calls in progress", retry_after_s=1.0).record()
            self._bus.spawn(self._respond(call, record), "refuse")
            return
        task = self._bus.spawn(self._run(call, msg.data), f"call {self.subject}")
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _run(self, call: Call, payload: bytes) -> None:
        answer: Answer | None
        try:
            answer = await self._handler(self._decode(payload), call)
        except BuswayError as error:
            self._notice(call, error)
            answer = error.record()
        except Exception:
            logger.exception("handler of %s failed", self.subject)
            answer = BuswayError("internal error").record()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Somebody else's cancellation leaked out of the handler; this call is nobody's to cancel.
            logger.exception("handler of %s let a CancelledError out", self.subject)
            answer = BuswayError("internal error").record()
        if answer is not None:
            await self._respond(call, answer)

    def _decode(self, payload: bytes) -> M:
        if self._expected is bytes:
            return cast("M", payload)
        return decode(payload, self._expected)

    def _notice(self, call: Call, error: BuswayError) -> None:
        # An error with an asker is the asker's to log; one that nobody will hear is logged here.
        if call.has_responded or (not call.reply and not isinstance(error, RequestError)):
            logger.warning("call on %s failed unheard: %s: %s", call.subject, error.code, error.message)

    async def _respond(self, call: Call, answer: Answer) -> None:
        try:
            await call.respond(answer)
        except PayloadTooLargeError as error:
            await call.respond(error.record())
        except BuswayError as error:
            logger.warning("no answer sent on %s: %s", call.subject, error.message)


class Listener(Serving):
    """A serving that hands raw messages to a synchronous callback, in order."""

    def __init__(self, bus: "Bus", subject: str, callback: Callable[[str, bytes], None]) -> None:
        super().__init__(bus, subject)
        self._callback = callback

    async def on_message(self, msg: Msg) -> None:
        """Run the callback; called by nats-py. Nothing here awaits, so a CancelledError can only be the callback's."""
        try:
            self._callback(msg.subject, msg.data)
        except (Exception, asyncio.CancelledError):
            logger.exception("listener on %s failed", self.subject)
