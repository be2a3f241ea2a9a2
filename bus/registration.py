"""Being in the fleet: a record with a time to live, renewed with the expected revision, and a heartbeat.

Both are needed: KV may be unwritable for seconds while everyone lives, and a heartbeat says nothing of what lives.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable

from bus.connection import Bus
from bus.lease_store import LeaseStore, WrongRevisionError
from bus.patiently import patiently
from bus.scope import open_scope, raise_if_cancelled
from bus.subjects import ServiceName
from schemas.errors import BusUnavailableError, BuswayError
from schemas.message import decode, encode
from schemas.worker import Heartbeat, Record, RuntimeConfig

logger = logging.getLogger(__name__)

BEAT_EVERY_S = 0.5
RENEW_EVERY_S = 4.0
LEAVE_TIMEOUT_S = 1.0
RECLAIM_JITTER_S = 0.2
MAX_CLAIM_TRIES = 5

Beat = Callable[[], tuple[int, bool]]


class TakenOverError(BuswayError):
    """Another process with a higher epoch registered under this id: this one must go."""

    code = "taken_over"


class Registration:
    """A service's place in the fleet; made by `register`. `record` is what it says now."""

    def __init__(self, bus: Bus, record: Record, beat: Beat) -> None:
        self.record = record
        self._bus = bus
        self._beat = beat
        self._store = LeaseStore(bus.jetstream(), bus.subjects.runtime_bucket, replicas=bus.replicas)
        self._revision = 0
        self._writing = asyncio.Lock()
        self._renew_now = asyncio.Event()
        self._successor: Heartbeat | None = None

    @property
    def key(self) -> str:
        return self._bus.subjects.record_key(self.record)

    async def update(self, record: Record) -> None:
        """Say something new (same id and epoch). A changed key (role) writes the new record before the old goes.

        While NATS is away the change is kept and written as soon as it is back. Raises TakenOverError.
        """
        async with self._writing:
            old_key, old_revision = self.key, self._revision
            self.record = record
            try:
                if self.key == old_key:
                    await self._write()
                else:
                    await self._claim()
                    await self._store.delete(old_key, old_revision)
            except BusUnavailableError as error:
                logger.warning("record of %s not written, trying again: %s", old_key, error.message)
                self._renew_now.set()

    async def claim(self) -> None:
        """Take the record's key: from nobody, from an expired record or from a lower epoch."""
        async with self._writing:
            await self._claim()

    async def run(self) -> None:
        """Renew the record until cancelled; raises TakenOverError."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_EVERY_S):
                    await self._renew_now.wait()
            self._renew_now.clear()
            if self._successor is not None:
                raise self._taken_over(self._successor.epoch)
            if self._bus.is_connected:
                await self._renew()
            raise_if_cancelled()

    async def run_heart(self) -> None:
        """Beat until cancelled. While disconnected nothing is sent: old beats would be told later as new ones."""
        while True:
            if self._bus.is_connected:
                progress, is_busy = self._beat()
                await self._publish_beat(progress=progress, is_busy=is_busy)
            await asyncio.sleep(BEAT_EVERY_S)

    async def leave(self) -> None:
        """Say goodbye and delete the record, unless it is a successor's; at most 1 s."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._publish_beat(is_leaving=True)
                async with self._writing:
                    await self._store.delete(self.key, self._revision)
        except (BuswayError, TimeoutError) as error:
            logger.warning("%s left without deleting its record (it expires): %r", self.key, error)

    async def renew_soon(self) -> None:
        """Write the record anew after a reconnect; jittered, as the whole fleet does it."""
        await asyncio.sleep(random.uniform(0, RECLAIM_JITTER_S))
        self._renew_now.set()

    @property
    def heartbeat_subject(self) -> str:
        service, id = _who(self.record)
        return self._bus.subjects.heartbeat(service, id)

    def on_heartbeat(self, subject: str, payload: bytes) -> None:
        """Watch the own heartbeat subject: a higher epoch is a successor, maybe under another key."""
        heartbeat = decode(payload, Heartbeat)
        if heartbeat.epoch > self.record.epoch:
            self._successor = heartbeat
            self._renew_now.set()

    async def _renew(self) -> None:
        async with self._writing:
            try:
                await self._write()
            except BusUnavailableError as error:
                logger.warning("record of %s not renewed: %s", self.key, error.message)

    async def _write(self) -> None:
        try:
            self._revision = await self._store.write(self.key, encode(self.record), self._revision)
        except (WrongRevisionError, BusUnavailableError):
            # Expired, the bucket is gone, an ack was lost, or somebody else wrote it.
            await self._claim()

    async def _claim(self) -> None:
        for _ in range(MAX_CLAIM_TRIES):
            await self._store.ensure()
            stored = await self._store.read(self.key)
            if stored.record is not None and stored.record.epoch > self.record.epoch:
                raise self._taken_over(stored.record.epoch)
            with contextlib.suppress(WrongRevisionError):
                self._revision = await self._store.write(self.key, encode(self.record), stored.revision)
                return
        raise BusUnavailableError(f"somebody else keeps writing {self.key}")

    async def _publish_beat(self, *, progress: int = 0, is_busy: bool = False, is_leaving: bool = False) -> None:
        _, id = _who(self.record)
        heartbeat = Heartbeat(id=id, epoch=self.record.epoch, progress=progress, is_busy=is_busy, is_leaving=is_leaving)
        try:
            await self._bus.publish(self.heartbeat_subject, encode(heartbeat))
        except BusUnavailableError as error:
            logger.warning("heartbeat not sent: %s", error.message)

    def _taken_over(self, epoch: int) -> TakenOverError:
        return TakenOverError(f"{self.key} was taken over by epoch {epoch}; ours is {self.record.epoch}")


@contextlib.asynccontextmanager
async def register(bus: Bus, record: Record, beat: Beat) -> AsyncIterator[Registration]:
    """Be in the fleet for the length of the block. `beat` returns (progress, is_busy) and is called twice a second.

    Raises TakenOverError at once when a higher epoch holds the id, and out of the block when one takes it over;
    BusUnavailableError when JetStream takes nothing for long at the start. Afterwards outages are survived. On
    leaving the fleet hears it within milliseconds.
    """
    registration = Registration(bus, record, beat)
    async with open_scope() as scope:
        echo = await bus.listen(registration.heartbeat_subject, registration.on_heartbeat)
        await patiently(registration.claim)
        raise_if_cancelled()
        forget = bus.on_reconnect(registration.renew_soon)
        scope.spawn(registration.run(), "registration")
        scope.spawn(registration.run_heart(), "heartbeat")
        try:
            yield registration
        finally:
            forget()
            await registration.leave()
            await echo.stop()


def _who(record: Record) -> tuple[ServiceName, str]:
    if isinstance(record, RuntimeConfig):
        return "worker", record.worker_id
    return record.service, record.id
