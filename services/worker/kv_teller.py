"""Tells routers what the engine's prefix cache gains and loses, and anyone who missed something what is in it.

The mirror of the cache lives on the event loop, so that a snapshot costs the engine nothing.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from bus.connection import Bus
from bus.serving import Call
from schemas.errors import BuswayError
from schemas.kv_events import KvChange, KvEvents, KvRemoved, KvSnapshot, KvSnapshotRequest, KvStored
from schemas.message import encode
from schemas.worker import RuntimeConfig
from services.engines.protocol import CacheChanged, EngineEvent

logger = logging.getLogger(__name__)

BYTES_PER_NAME = 8
ENVELOPE_BYTES = 4096
"""Of a message, for everything but the names."""


class KvTeller:
    """`take` returns at once; `run` publishes: all up to `published_id` has been, or could not be.

    Ids count changes. What the bus won't take leaves a gap in them, which routers heal by a snapshot.
    """

    def __init__(self, bus: Bus, me: RuntimeConfig) -> None:
        self.last_id = 0
        self.published_id = 0
        self._bus = bus
        self._me = me
        self._subject = bus.subjects.kv_events(me.model, me.worker_id)
        self._held: set[int] = set()
        self._pending: list[KvChange] = []
        self._has_news = asyncio.Event()

    def take(self, events: Sequence[EngineEvent]) -> bool:
        """Pick out of an engine step's events what concerns the cache; return whether there was anything."""
        found = [change for event in events if isinstance(event, CacheChanged) for change in event.changes]
        self._pending += found
        if found:
            self._has_news.set()
        return bool(found)

    async def run(self) -> None:
        """Publish what comes, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            await self._publish()

    async def on_snapshot(self, request: KvSnapshotRequest, call: Call) -> KvSnapshot:
        """Return what has been told so far, or in how many parts it has to be asked for."""
        num_bytes = len(self._held) * BYTES_PER_NAME
        num_parts = -(-num_bytes * 4 // (3 * (self._bus.max_payload_bytes - ENVELOPE_BYTES))) or 1
        num_parts += num_parts > 1  # names aren't spread quite evenly
        is_enough = request.num_parts >= num_parts
        names = np.fromiter(self._held, dtype="<u8", count=len(self._held)) if is_enough else np.empty(0, dtype="<u8")
        part = names[names % np.uint64(request.num_parts) == request.part]
        return KvSnapshot(
            worker_id=self._me.worker_id,
            epoch=self._me.epoch,
            last_id=self.last_id,
            blocks=part.tobytes(),
            num_parts=request.num_parts if is_enough else num_parts,
        )

    async def _publish(self) -> None:
        changes, self._pending = self._pending, []
        for batch in _batches(changes, self._bus.max_payload_bytes - ENVELOPE_BYTES):
            first_id, self.last_id = self.last_id + 1, self.last_id + len(batch)
            for change in batch:
                self._note(change)
            me = self._me
            events = KvEvents(worker_id=me.worker_id, epoch=me.epoch, first_id=first_id, changes=tuple(batch))
            try:
                await self._bus.publish(self._subject, encode(events))
            except BuswayError as error:
                logger.warning("KV events %d to %d lost: %s", first_id, self.last_id, error.message)
            self.published_id = self.last_id

    def _note(self, change: KvChange) -> None:
        match change:
            case KvStored():
                self._held.update(np.frombuffer(change.blocks, dtype="<u8").tolist())
            case KvRemoved():
                self._held.difference_update(np.frombuffer(change.blocks, dtype="<u8").tolist())
            case _:
                self._held.clear()


def _batches(changes: list[KvChange], max_bytes: int) -> list[list[KvChange]]:
    """Cut changes into messages; one too large by itself is left to the bus to refuse."""
    batches: list[list[KvChange]] = []
    room = 0
    for change in changes:
        num_bytes = 64 + (len(change.blocks) * 4 // 3 if isinstance(change, KvStored | KvRemoved) else 0)
        if not batches or num_bytes > room:
            batches.append([])
            room = max_bytes
        batches[-1].append(change)
        room -= num_bytes
    return batches
