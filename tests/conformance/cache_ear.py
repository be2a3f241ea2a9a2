"""What a router would know of one worker's prefix cache: its KV events, held together."""

from collections.abc import Callable

import numpy as np

from bus.connection import Bus
from schemas.ids import WorkerId
from schemas.kv_events import KvEvents, KvRemoved, KvStored
from schemas.message import decode


class CacheEar:
    """The names of the blocks held, from now on. A gap in the events fails the test."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.held: set[int] = set()
        self._on_news = on_news
        self._next_id = 0

    @classmethod
    async def at(cls, bus: Bus, model: str, worker: WorkerId, on_news: Callable[[], None]) -> "CacheEar":
        """Return one that listens to a worker."""
        ear = cls(on_news)
        await bus.listen(bus.subjects.kv_events(model, worker), ear.hear)
        return ear

    def hear(self, subject: str, payload: bytes) -> None:
        """Take a message of KV events."""
        events = decode(payload, KvEvents)
        assert self._next_id in (0, events.first_id), "a gap in the KV events"
        self._next_id = events.first_id + len(events.changes)
        for change in events.changes:
            match change:
                case KvStored():
                    self.held.update(np.frombuffer(change.blocks, "<u8").tolist())
                case KvRemoved():
                    self.held.difference_update(np.frombuffer(change.blocks, "<u8").tolist())
                case _:
                    self.held.clear()
        self._on_news()
