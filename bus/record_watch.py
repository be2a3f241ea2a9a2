"""Following the record bucket through server restarts, bucket loss and expiry.

A JetStream watcher goes silent for good when its consumer is lost (a restart of the server), so it is asked after
once a second, and started anew after each reconnect; each start delivers a snapshot to reconcile with.
"""

import asyncio
import contextlib
import logging
from typing import Protocol

from nats.aio.msg import Msg
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import DeliverPolicy
from nats.js.errors import NotFoundError

from bus.connection import Bus
from bus.lease_store import LeaseStore, parse_record
from bus.scope import raise_if_cancelled
from schemas.errors import BusUnavailableError
from schemas.worker import Record

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
RETRY_AFTER_S = 0.25
SNAPSHOT_TIMEOUT_S = 3.0
# The server forgets a watcher that went without a word after this long.
CONSUMER_INACTIVE_S = 10.0
MAX_LEFT_BEHIND = 16


class RecordSink(Protocol):
    """Whom a watch tells. `snapshot` comes after the puts of all these keys."""

    def put(self, key: str, record: Record) -> None: ...

    def delete(self, key: str) -> None: ...

    def expire(self, key: str) -> None: ...

    def snapshot(self, keys: set[str]) -> None: ...


class RecordWatch:
    """One ordered consumer over the bucket, from a snapshot on; deaf once stopped. `consumer` is its name at the server
    as soon as that is known."""

    def __init__(self, jetstream: JetStreamContext, store: LeaseStore, sink: RecordSink) -> None:
        self._js = jetstream
        self._store = store
        self._sink = sink
        self._keys: set[str] = set()
        self._is_complete = asyncio.Event()
        self._is_stopped = False
        self._subscription: JetStreamContext.PushSubscription | None = None
        self.consumer = ""

    async def start(self) -> None:
        """Subscribe and return with the snapshot complete; raises BusUnavailableError."""
        await self._store.ensure()
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self._subscription = await self._js.subscribe(
                    f"{self._store.prefix}>",
                    stream=self._store.stream,
                    cb=self._on_entry,
                    ordered_consumer=True,
                    deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                    inactive_threshold=CONSUMER_INACTIVE_S,
                )
                consumer = await self._subscription.consumer_info()
                self.consumer = consumer.name
                if consumer.num_pending == 0 and consumer.delivered.stream_seq == 0:
                    self._complete()
                await self._is_complete.wait()
        except (Error, TimeoutError) as error:
            raise BusUnavailableError(f"can't watch {self._store.bucket}: {error!r}") from error

    async def check(self) -> None:
        """Raise BusUnavailableError when the server no longer knows this watch."""
        if self._subscription is not None:
            try:
                await self._subscription.consumer_info()
            except Error as error:
                raise BusUnavailableError(f"watch of {self._store.bucket} is gone: {error}") from error

    async def stop(self) -> None:
        """Hear no more."""
        self._is_stopped = True
        if self._subscription is not None:
            with contextlib.suppress(Error):
                await self._subscription.unsubscribe()

    async def _on_entry(self, msg: Msg) -> None:
        if self._is_stopped:
            return
        try:
            self._take(msg)
        except Exception:
            logger.exception("entry %s of the record bucket", msg.subject)
        if not self._is_complete.is_set() and msg.metadata.num_pending == 0:
            self._complete()

    def _take(self, msg: Msg) -> None:
        key = msg.subject.removeprefix(self._store.prefix)
        headers = msg.headers or {}
        if "Nats-Marker-Reason" in headers:
            self._sink.expire(key)
        elif "KV-Operation" in headers:
            self._sink.delete(key)
        else:
            if not self._is_complete.is_set():
                self._keys.add(key)
            record = parse_record(msg.data)
            if record is None:
                logger.warning("record %s can't be read: a newer release's?", key)
            else:
                self._sink.put(key, record)

    def _complete(self) -> None:
        self._is_complete.set()
        self._sink.snapshot(self._keys)


async def keep_watching(bus: Bus, sink: RecordSink, has_snapshot: asyncio.Event) -> None:
    """Watch until cancelled, whatever happens to the server; sets `has_snapshot` after each snapshot."""
    has_reconnected = asyncio.Event()
    left_behind: list[str] = []

    async def reconnected() -> None:
        has_reconnected.set()

    forget = bus.on_reconnect(reconnected)
    try:
        while True:
            raise_if_cancelled()
            has_reconnected.clear()
            try:
                await _watch_once(bus, sink, has_snapshot, has_reconnected, left_behind)
            except BusUnavailableError as error:
                logger.warning("watching anew: %s", error.message)  # several a second: floods of warnings are capped
                await asyncio.sleep(RETRY_AFTER_S)
    finally:
        forget()


async def _watch_once(
    bus: Bus,
    sink: RecordSink,
    has_snapshot: asyncio.Event,
    has_reconnected: asyncio.Event,
    left_behind: list[str],
) -> None:
    await bus.link.is_up.wait()
    jetstream = bus.jetstream()
    store = LeaseStore(jetstream, bus.subjects.runtime_bucket, replicas=bus.replicas)
    watch = RecordWatch(jetstream, store, sink)
    try:
        await watch.start()
        has_snapshot.set()
        await _delete_consumers(jetstream, store.stream, left_behind)
        while not has_reconnected.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await has_reconnected.wait()
            if bus.is_connected and not has_reconnected.is_set():
                await watch.check()
            raise_if_cancelled()
    finally:
        await watch.stop()
        if watch.consumer:
            left_behind.append(watch.consumer)
            del left_behind[:-MAX_LEFT_BEHIND]


async def _delete_consumers(jetstream: JetStreamContext, stream: str, names: list[str]) -> None:
    """Take back what earlier watches left at the server, which in a cluster that has lost a leader may keep them for
    good (seen with nats-server 2.15). What can't be deleted now stays in `names`."""
    while names:
        try:
            with contextlib.suppress(NotFoundError):
                await jetstream.delete_consumer(stream, names[0])
        except Error:
            return
        names.pop(0)
