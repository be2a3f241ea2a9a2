"""The state of one connection as nats-py reports it: up, down, back, closed for good, and every error it notices.

nats-py calls these from its own tasks; nothing here raises into them.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from nats.aio.subscription import Subscription
from nats.errors import SlowConsumerError, UnexpectedEOF

from bus.log_limit import LogLimiter

logger = logging.getLogger(__name__)


class Link:
    """Callbacks for nats-py, and what follows from them. `num_dropped` counts messages lost to slow consumption."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_up = asyncio.Event()
        self.is_closed = asyncio.Event()
        self.num_dropped = 0
        self.is_leaving = False
        self.last_error: Exception | None = None
        self.came_back: Callable[[], None] | None = None
        self.on_drop: dict[Subscription, Callable[[int], None]] = {}
        self._limiter = LogLimiter()

    async def connected(self) -> None:
        self.is_up.set()

    async def disconnected(self) -> None:
        self.is_up.clear()
        if not self.is_leaving:
            logger.warning("%s: connection to NATS lost, reconnecting", self.name)

    async def reconnected(self) -> None:
        self.is_up.set()
        logger.info("%s: connection to NATS is back", self.name)
        if self.came_back is not None:
            self.came_back()

    async def closed(self) -> None:
        self.is_up.clear()
        self.is_closed.set()

    async def noticed(self, error: Exception) -> None:
        """Take an error that has no caller: a slow consumer, a refused permission, a failed reconnect."""
        self.last_error = error
        if isinstance(error, SlowConsumerError):
            self._dropped(error.sub)
        elif self.is_up.is_set() and not isinstance(error, UnexpectedEOF):  # `disconnected` says that better
            self._log(f"{type(error).__name__}: {error}")

    def _dropped(self, subscription: Subscription) -> None:
        # nats-py drops the newest message: no later one may ever show the gap, so whoever listens must be told.
        self.num_dropped += 1
        self._log(f"slow consumer: messages on {subscription.subject} are being lost")
        on_drop = self.on_drop.get(subscription)
        if on_drop is not None:
            on_drop(subscription.pending_msgs)

    def _log(self, text: str) -> None:
        if self._limiter.allows(text, time.monotonic()):
            logger.warning("%s: NATS: %s", self.name, text)
