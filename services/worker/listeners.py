"""Whether anybody still listens to the streams of owners without a heartbeat.

Publishing to a dead inbox raises nothing. But a request to a subject that nobody listens to is answered at once by
NATS itself; a listener never answers it (an empty frame list is no news to him).
"""

import asyncio
import contextlib
from collections.abc import Callable

from bus.connection import Bus
from schemas.errors import AckTimeoutError, BusUnavailableError, NoRespondersError
from services.worker.ledger import Ledger

PERIOD_S = 2.0
ANSWER_S = 0.2
MAX_DEAF = 3
NO_FRAMES = b"[]"


class ListenerWatch:
    """`on_gone` gets a stream subject that nobody listened to in three looks on end: less may be a reconnect."""

    def __init__(self, bus: Bus, ledger: Ledger, on_gone: Callable[[str], None]) -> None:
        self._bus = bus
        self._ledger = ledger
        self._on_gone = on_gone
        self._num_deaf: dict[str, int] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Ask once for every stream without an owner."""
        subjects = {entry.stream_subject for entry in self._ledger if not entry.owner}
        self._num_deaf = {subject: num for subject, num in self._num_deaf.items() if subject in subjects}
        async with asyncio.TaskGroup() as looks:
            for subject in subjects:
                looks.create_task(self._look_at(subject), name="look for a listener")

    async def _look_at(self, subject: str) -> None:
        try:
            with contextlib.suppress(AckTimeoutError, BusUnavailableError):
                await self._bus.ask(subject, NO_FRAMES, bytes, timeout_s=ANSWER_S)
            self._num_deaf[subject] = 0
        except NoRespondersError:
            self._num_deaf[subject] = self._num_deaf.get(subject, 0) + 1
            if self._num_deaf[subject] >= MAX_DEAF:
                self._on_gone(subject)
