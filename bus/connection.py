"""One process's connection to the bus: publish, ask, serve, listen, and the tasks that live as long as it.

The order of leaving matters (nats-py's drain waits for callbacks, not for the tasks they started): stop the
subscriptions, wait for the calls, cancel what is left, send what is buffered, close. All of it bounded.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from types import UnionType
from typing import Any, Self, TypeVar, overload

from nats.aio.client import Client as NatsClient
from nats.errors import ConnectionClosedError, ConnectionDrainingError, Error, MaxPayloadError, OutboundBufferLimitError
from nats.js import JetStreamContext

from bus.asks import Asks
from bus.link import Link
from bus.micro import MicroService
from bus.one_host import is_one_host
from bus.scope import Scope, open_scope
from bus.servers import parse_servers
from bus.serving import Answer, Call, ErrorAnswer, Listener, Service, Serving
from bus.subjects import INBOX_ROOT, INTERNAL_INBOX_ROOT, Subjects, check_subject, slug
from bus.subscriptions import PENDING_MESSAGES_LIMIT, Subscriptions
from schemas.errors import AckTimeoutError, BusError, BusUnavailableError, BuswayError, PayloadTooLargeError
from schemas.message import Message, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")

MIB = 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
SETTLE_TIMEOUT_S = 1.0
ECHO_TIMEOUT_S = 0.5
LEAVE_TIMEOUT_S = 3.0
RECONNECT_WAIT_S = 0.1
# What publish may buffer while disconnected, and before it waits for the socket.
OUTBOUND_LIMIT_BYTES = 16 * MIB
MAX_CONCURRENT_CALLS = 4096


class Bus:
    """A connection with its tasks; made by `Bus.connect`. Everything started here ends with it."""

    def __init__(
        self,
        client: NatsClient,
        link: Link,
        scope: Scope,
        *,
        client_id: str,
        subjects: Subjects,
        replicas: int,
        is_internal: bool,
    ) -> None:
        self.client_id = slug(client_id)
        self.subjects = subjects
        self.replicas = replicas
        self.inbox = _inbox(client_id, is_internal)
        self.link = link
        self._nats = client
        self._scope = scope
        self._subscriptions = Subscriptions(client, link, scope, self.settle)
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._asks = Asks(f"{self.inbox}.{secrets.token_hex(8)}")
        # What comes back from the server: our own echo, or for the client user, who may not publish to inboxes,
        # the word that nobody serves a model without a name.
        self._settle_subject = "" if is_internal else subjects.requests("")

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        client_id: str,
        namespace: str = "busway",
        replicas: int = 1,
        is_internal: bool = True,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> AsyncIterator[Self]:
        """Connect, and leave cleanly at the end of the block (within about 6 s, whatever the server does).

        `url` may be several, with commas between. `client_id` names the inbox and must be this connection's own.
        `replicas`: of buckets made here, on a cluster. `is_internal=False` is for the server's client user, who may
        not use internal inboxes. Raises BusUnavailableError when NATS doesn't let us in within
        `timeout_s`, and out of the block when the connection is closed for good.
        """
        subjects = Subjects(namespace)
        link = Link(name)
        client = await _connect(url, name, _inbox(client_id, is_internal), link, timeout_s)
        try:
            async with open_scope() as scope:
                bus = cls(
                    client,
                    link,
                    scope,
                    client_id=client_id,
                    subjects=subjects,
                    replicas=replicas,
                    is_internal=is_internal,
                )
                scope.spawn(_fail_when_closed(link), "bus guard")
                await bus._start()
                try:
                    yield bus
                finally:
                    await bus._leave()
        finally:
            link.is_leaving = True
            await _close(client, link)

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for one message, headers included."""
        return int(self._nats.max_payload)

    @property
    def is_connected(self) -> bool:
        return self.link.is_up.is_set()

    @property
    def is_one_host(self) -> bool:
        """Whether the server is one that only processes of this machine can reach: an embedded one of its own."""
        return is_one_host(str(self._nats._server_info.get("server_name")))

    @property
    def servings(self) -> Sequence[Serving]:
        """The live subscriptions of `serve` and `listen`."""
        return self._subscriptions.servings

    @property
    def num_dropped(self) -> int:
        """Messages lost so far because a subscription's callbacks were too slow."""
        return self.link.num_dropped

    def jetstream(self, *, timeout_s: float = 2.0) -> JetStreamContext:
        """Return a JetStream context, for the modules of this package."""
        return self._nats.jetstream(timeout=timeout_s)

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Send a message. While disconnected it is kept (16 MiB in all) and sent after the reconnect.

        Raises PayloadTooLargeError with both numbers, BusUnavailableError when closed or the buffer is full, BusError
        for wildcards and malformed subjects.
        """
        check_subject(subject)
        client = self._nats
        if len(payload) > client.max_payload:
            raise PayloadTooLargeError(
                f"message of {len(payload)} bytes exceeds NATS's limit of {client.max_payload} bytes"
            )
        try:
            if client.pending_data_size + len(payload) < OUTBOUND_LIMIT_BYTES:
                await client.publish(subject, payload, reply)
            else:
                await _publish_slowly(client, subject, payload, reply)
        except OutboundBufferLimitError as error:
            raise BusUnavailableError("no connection to NATS, and the outbound buffer is full") from error
        except (ConnectionClosedError, ConnectionDrainingError) as error:
            raise BusUnavailableError("the connection to NATS is closed") from error
        except MaxPayloadError as error:
            raise PayloadTooLargeError(f"message of {len(payload)} bytes exceeds NATS's limit") from error

    @overload
    async def ask(self, subject: str, message: Message | bytes, answer: type[T], *, timeout_s: float = ...) -> T: ...
    @overload
    async def ask(
        self, subject: str, message: Message | bytes, answer: UnionType, *, timeout_s: float = ...
    ) -> Any: ...
    async def ask(self, subject: str, message: Message | bytes, answer: Any, *, timeout_s: float = 1.0) -> Any:
        """Send a request and return its answer (one of `answer`, which may be a union; or bytes).

        Waits for a lost connection within the same `timeout_s`. An ErrorRecord is raised as what it stands for, also
        when the union names it. Raises NoRespondersError, AckTimeoutError, PayloadTooLargeError, BusUnavailableError:
        also, up to half a second later, when NATS is as silent as the one who was asked.
        A timed-out request may still be delivered: the receiver must know its deadline and dedupe.
        """
        payload = message if isinstance(message, bytes) else encode(message)
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.is_up.wait()
                with self._asks.expect() as (reply, future):
                    await self.publish(subject, payload, reply=reply)
                    msg = await future
        except TimeoutError:
            if not self.is_connected:
                raise BusUnavailableError(f"no connection to NATS within {timeout_s} s") from None
            if not await self._is_echoed(min(timeout_s / 2, ECHO_TIMEOUT_S)):  # the one who was asked may be well
                raise BusUnavailableError(f"NATS itself is silent: no answer within {timeout_s} s") from None
            raise AckTimeoutError(f"no answer from {subject} within {timeout_s} s") from None
        return self._asks.read(subject, msg, answer)

    @overload
    async def serve(
        self,
        subject: str,
        expected: type[M],
        handler: Callable[[M, Call], Awaitable[Answer | None]],
        *,
        queue: str = "",
        max_concurrent_calls: int = ...,
        error_answer: ErrorAnswer = ...,
    ) -> Serving: ...
    @overload
    async def serve(
        self,
        subject: str,
        expected: UnionType,
        handler: Callable[[Any, Call], Awaitable[Answer | None]],
        *,
        queue: str = "",
        max_concurrent_calls: int = ...,
        error_answer: ErrorAnswer = ...,
    ) -> Serving: ...
    async def serve(
        self,
        subject: str,
        expected: Any,
        handler: Callable[[Any, Call], Awaitable[Answer | None]],
        *,
        queue: str = "",
        max_concurrent_calls: int = MAX_CONCURRENT_CALLS,
        error_answer: ErrorAnswer = BuswayError.record,
    ) -> Serving:
        """Answer calls on a subject, each in its own task; `expected` may be a union, or bytes for raw payloads.

        What the handler returns is the answer (None: none, or it has used call.respond). A BuswayError becomes an
        ErrorRecord answer, any other exception is logged and becomes one too, so does a message that can't be
        decoded. Beyond `max_concurrent_calls` callers get CapacityError at once. `error_answer` gives errors another
        form than ErrorRecord. On return the subscription is live.
        """
        service = Service(self, subject, queue, expected, handler, max_concurrent_calls, error_answer)
        await self._subscriptions.open(service)
        await self.settle()
        return service

    async def listen(
        self,
        subject: str,
        callback: Callable[[str, bytes], None],
        *,
        queue: str = "",
        on_drop: Callable[[int], None] | None = None,
        max_pending_messages: int = PENDING_MESSAGES_LIMIT,
    ) -> Serving:
        """Hand every message on a subject (wildcards allowed) to `callback(subject, payload)`, in order.

        The callback's exceptions are logged and nothing else. `on_drop` is called for each message lost because
        callbacks were too slow, with the number of earlier messages still waiting for theirs. On return the
        subscription is live.
        """
        listener = Listener(subject, queue, callback)
        await self._subscriptions.open(listener, max_pending_messages, on_drop)
        await self.settle()
        return listener

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the bus's task group; an exception it lets out is logged. Cancelled on leaving."""
        return self._scope.spawn(_logged(coro, name), name)

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` in a task of its own after each reconnect; return a function that takes it back."""
        self._reconnect_callbacks.append(callback)
        return lambda: self._reconnect_callbacks.remove(callback)

    async def announce(self, service: str, version: str, metadata: dict[str, str] | None = None) -> None:
        """Answer the NATS micro protocol ($SRV.PING, INFO, STATS) as `busway-{service}`, for `nats micro ls`."""
        await MicroService(self, service, version, metadata or {}).start()

    async def settle(self) -> None:
        """Return when the server has taken all that was sent before: an echo to ourselves, at most 1 s.

        nats-py's flush can't be used for this: it overtakes queued SUB and PUB lines, and cancelling it kills the
        read loop when the PONG comes.
        """
        if self.is_connected:
            await self._is_echoed(SETTLE_TIMEOUT_S)

    async def _is_echoed(self, within_s: float) -> bool:
        """Return whether the server sends back what we send."""
        with contextlib.suppress(BusError, TimeoutError), self._asks.expect() as (reply, future):
            async with asyncio.timeout(within_s):
                await self.publish(self._settle_subject or reply, b"", reply=reply)
                await future
                return True
        return False

    async def _start(self) -> None:
        self.link.came_back = self._came_back
        await self._nats.subscribe(f"{self.inbox}.*", cb=self._asks.on_message)
        await self.settle()

    def _came_back(self) -> None:
        for callback in list(self._reconnect_callbacks):
            self.spawn(_call(callback), "reconnect callback")

    async def _leave(self) -> None:
        self.link.came_back = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._subscriptions.close_all()


def _inbox(client_id: str, is_internal: bool) -> str:
    return f"{INTERNAL_INBOX_ROOT if is_internal else INBOX_ROOT}.{slug(client_id)}"


async def _connect(url: str, name: str, inbox: str, link: Link, timeout_s: float) -> NatsClient:
    client, servers = NatsClient(), parse_servers(url)
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(
                servers.urls,
                **servers.login._asdict(),
                name=name,
                inbox_prefix=inbox,
                error_cb=link.noticed,
                disconnected_cb=link.disconnected,
                reconnected_cb=link.reconnected,
                closed_cb=link.closed,
                allow_reconnect=False,  # a refused login is final; a refused connection is tried again regardless
                reconnect_time_wait=RECONNECT_WAIT_S,
                max_reconnect_attempts=-1,
                ping_interval=10,
                pending_size=OUTBOUND_LIMIT_BYTES,
            )
    except TimeoutError:
        why = str(link.last_error or "") or "it takes connections and says nothing"
        raise BusUnavailableError(f"no connection to NATS within {timeout_s} s: {why}") from None
    except (Error, OSError) as error:
        raise BusUnavailableError(f"NATS refused the connection: {error}") from error
    client.options["allow_reconnect"] = True
    await link.connected()
    return client


async def _close(client: NatsClient, link: Link) -> None:
    if not link.is_up.is_set():
        # nats-py would write what waits for a reconnect to the closed transport, which uvloop's doesn't take.
        client._pending.clear()
        client._pending_data_size = 0
    with contextlib.suppress(TimeoutError, Error, OSError):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await client.close()


async def _fail_when_closed(link: Link) -> None:
    await link.is_closed.wait()
    raise BusUnavailableError(f"the connection to NATS was closed for good: {link.last_error}")


async def _publish_slowly(client: NatsClient, subject: str, payload: bytes, reply: str) -> None:
    # With the buffer full nats-py waits for the socket, and swallows a cancellation that comes meanwhile.
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    await client.publish(subject, payload, reply)
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


async def _logged(coro: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await coro
    except Exception:
        logger.exception("%s failed", name)


async def _call(callback: Callable[[], Awaitable[None]]) -> None:
    await callback()
