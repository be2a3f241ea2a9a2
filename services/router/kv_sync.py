"""Keeps a router's prefix index in step with its workers over the bus: hears their events, asks for what it missed."""

import asyncio
import contextlib
import logging
from typing import Literal

from bus.connection import Bus
from bus.scope import open_scope
from schemas.errors import BuswayError
from schemas.ids import WorkerId
from schemas.kv_events import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.message import decode
from schemas.worker import Record, RuntimeConfig
from services.router.kv_desk import KvDesk

logger = logging.getLogger(__name__)

RETRY_S = 0.25
MAX_AT_ONCE = 16


class KvSync:
    """`run` asks for snapshots; the rest is told by the bus."""

    def __init__(self, bus: Bus, desk: KvDesk) -> None:
        self._bus = bus
        self._desk = desk
        self._asked: set[WorkerId] = set()
        self._has_news = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    def on_change(self, kind: Literal["joined", "changed", "left"], record: Record) -> None:
        """Take a change of the fleet, as bus.discovery tells it."""
        if isinstance(record, RuntimeConfig):
            if kind == "left":
                self._desk.left(record.worker_id)
            else:
                self._desk.joined(record)
            self._has_news.set()

    def on_events(self, subject: str, payload: bytes) -> None:
        """Take a worker's KV events."""
        self._desk.on_events(decode(payload, KvEvents))
        self.look()

    def look(self) -> None:
        """Something may be missing now."""
        if any(worker not in self._asked for worker in self._desk.feed.missing()):
            self._has_news.set()

    async def run(self) -> None:
        """Ask for the snapshots that are missing, until cancelled."""
        async with open_scope() as scope:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._has_news.wait()
                self._has_news.clear()
                for worker in self._desk.feed.missing():
                    if worker not in self._asked:
                        self._asked.add(worker)
                        scope.spawn(self._fetch(worker), f"KV snapshot of {worker}")

    async def _fetch(self, worker: WorkerId) -> None:
        """Ask one worker, once; a failure is met again a moment later."""
        try:
            async with self._slots:
                await self._ask(worker)
        except BuswayError as error:
            logger.debug("no KV snapshot of %s yet: %s", worker, error.message)
            await asyncio.sleep(RETRY_S)
        finally:
            self._asked.discard(worker)

    async def _ask(self, worker: WorkerId) -> None:
        subject = self._bus.subjects.peer(worker, "kv_snapshot")
        num_parts, part = 1, 0
        while part < num_parts:
            request = KvSnapshotRequest(part=part, num_parts=num_parts)
            snapshot = await self._bus.ask(subject, request, KvSnapshot, timeout_s=2.0)
            if snapshot.num_parts != num_parts:
                num_parts, part = snapshot.num_parts, 0
                continue
            self._desk.feed.on_snapshot(snapshot, part)
            part += 1
