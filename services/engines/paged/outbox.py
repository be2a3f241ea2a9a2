"""From the engine's thread to the event loop: notices in order, one wake-up for all of a step.

When the event loop falls behind, steps coalesce into one call, and past a few of them the engine waits for it: that
bounds memory, the age of what clients see, and how long a fast engine can keep the interpreter from the event loop.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import msgspec

from schemas.ids import AttemptId
from services.engines.paged.desk import Notice, Notify

MAX_UNDELIVERED_STEPS = 4


class Unmute(msgspec.Struct, frozen=True):
    """In the stream of notices: the abort of this attempt has been applied, none of its notices follow."""

    attempt_id: AttemptId


class Outbox:
    """Delivers to `notify` on the loop's thread; an exception of `notify` goes to `on_error`, there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Notify, on_error: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._notify = notify
        self._on_error = on_error
        self._pending: list[Notice | Unmute] = []
        self._num_undelivered = 0
        self._is_closed = False
        self._delivered = threading.Condition()
        self._muted: Counter[AttemptId] = Counter()

    def put(self, notices: list[Notice | Unmute]) -> None:
        """Queue a step's notices (engine's thread); waits while too many steps are undelivered."""
        with self._delivered:
            self._pending += notices
            self._num_undelivered += 1
            if self._num_undelivered == 1 and not self._is_closed:
                self._loop.call_soon_threadsafe(self._deliver)
            while self._num_undelivered > MAX_UNDELIVERED_STEPS and not self._is_closed:
                self._delivered.wait()

    def mute(self, attempt_id: AttemptId) -> None:
        """Swallow an aborted attempt's notices until its Unmute, of several the last (loop's thread)."""
        self._muted[attempt_id] += 1

    def close(self) -> None:
        """Deliver nothing more and never wait again."""
        with self._delivered:
            self._is_closed = True
            self._delivered.notify_all()

    def _deliver(self) -> None:
        with self._delivered:
            pending, self._pending = self._pending, []
            self._num_undelivered = 0
            is_closed = self._is_closed
            self._delivered.notify_all()
        if is_closed:
            return
        try:
            notices = self._audible(pending)
            if notices:
                self._notify(notices)
        except Exception as error:
            self._on_error(error)

    def _audible(self, pending: list[Notice | Unmute]) -> list[Notice]:
        if not self._muted:
            return pending  # type: ignore[return-value]  # an Unmute is only ever sent for a muted attempt
        audible: list[Notice] = []
        for notice in pending:
            if isinstance(notice, Unmute):
                self._muted.subtract((notice.attempt_id,))
                if not self._muted[notice.attempt_id]:
                    del self._muted[notice.attempt_id]
            elif notice.attempt_id not in self._muted:
                audible.append(notice)
        return audible
