"""The NATS subscriptions behind a bus's servings: opened, drained, and all closed at the end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nats.aio.client import Client as NatsClient
from nats.aio.subscription import Subscription
from nats.errors import Error

from bus.link import Link
from bus.scope import Scope
from bus.serving import Serving
from schemas.errors import BusUnavailableError

MIB = 1024 * 1024
# Per subscription; beyond it nats-py drops the newest message (Link.noticed makes that visible).
PENDING_MESSAGES_LIMIT = 64 * 1024
PENDING_BYTES_LIMIT = 128 * MIB
DRAIN_TIMEOUT_S = 3.0


class Subscriptions:
    """Those of one connection. `servings` are the live ones; `settle` returns when the server has taken all sent."""

    def __init__(self, client: NatsClient, link: Link, scope: Scope, settle: Callable[[], Awaitable[None]]) -> None:
        self.servings: list[Serving] = []
        self._client = client
        self._link = link
        self._scope = scope
        self._settle = settle

    async def open(
        self,
        serving: Serving,
        max_pending_messages: int = PENDING_MESSAGES_LIMIT,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        """Subscribe for a serving; raises BusUnavailableError. The server may not know of it yet (Bus.settle)."""
        try:
            subscription = await self._client.subscribe(
                serving.subject,
                serving.queue,
                cb=serving.on_message,
                pending_msgs_limit=max_pending_messages,
                pending_bytes_limit=PENDING_BYTES_LIMIT,
            )
        except Error as error:
            raise BusUnavailableError(f"can't subscribe to {serving.subject}: {error}") from error
        if on_drop is not None:
            self._link.on_drop[subscription] = on_drop
        self.servings.append(serving)
        serving.attach(lambda: self._close(serving, subscription))

    async def close_all(self) -> None:
        """Stop every serving and wait for its calls."""
        for serving in list(self.servings):
            await serving.stop()
            await serving.wait_idle()

    async def _close(self, serving: Serving, subscription: Subscription) -> None:
        self.servings.remove(serving)
        self._link.on_drop.pop(subscription, None)
        if self._link.is_up.is_set():
            # In a task of its own: nats-py's drain flushes, and when a flush that was cancelled gets its PONG after
            # all, the read loop dies.
            drained = self._scope.spawn(self._drain(subscription), f"drain {serving.subject}")
            await asyncio.wait({drained}, timeout=DRAIN_TIMEOUT_S)
        else:
            with contextlib.suppress(Error):
                await subscription.unsubscribe()

    async def _drain(self, subscription: Subscription) -> None:
        """nats-py's drain may let its PING overtake the UNSUB, and then forgets a subscription that the server still
        delivers to: so UNSUB goes first, and an echo proves that the server has it (nats-py 2.16, Subscription._drain).
        """
        with contextlib.suppress(Error):
            await self._client._send_unsubscribe(subscription._id)
            await self._settle()
            await subscription.drain()
