"""Watching the fleet over NATS: the records, the heartbeats, and whether the line can be trusted at all.

The line is proven by an echo: a probe to ourselves that must return within LINE_LATE_S. So nobody is judged while
disconnected, while the server hangs, or right after this very process was stopped and woken.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from bus.connection import Bus
from bus.fleet_state import Change, ChangeKind, FleetState, Ident
from bus.record_watch import keep_watching
from bus.scope import open_scope
from schemas.errors import BusUnavailableError
from schemas.ids import WorkerId
from schemas.message import decode
from schemas.worker import Heartbeat, Record, RuntimeConfig, ServiceRecord

logger = logging.getLogger(__name__)

TICK_EVERY_S = 0.25
LINE_LATE_S = 1.0
FIRST_SNAPSHOT_TIMEOUT_S = 5.0
FIRST_BEATS_TIMEOUT_S = 1.2  # two heartbeats and a little

OnChange = Callable[[ChangeKind, Record], None]


class Fleet:
    """The live services, kept current; made by `watch`. Read the dicts, don't keep or change them."""

    def __init__(self, bus: Bus) -> None:
        self.workers: dict[WorkerId, RuntimeConfig] = {}
        self.routers: dict[str, ServiceRecord] = {}
        self.gateways: dict[str, ServiceRecord] = {}
        self._bus = bus
        self._state = FleetState()
        self._callbacks: list[OnChange] = []
        self._waiters: set[asyncio.Event] = set()
        self._echoed_at = time.monotonic()
        self._is_line_good = True

    @property
    def all_records(self) -> dict[str, Record]:
        """All records by bucket key, also of services that aren't live."""
        return self._state.records

    @property
    def is_heard(self) -> bool:
        """Whether what the fleet says reaches us: NATS sends back what we send. While it doesn't nobody is judged."""
        return self._bus.is_connected and self._is_line_good

    def heartbeat(self, worker_id: WorkerId) -> Heartbeat | None:
        """Return the last heartbeat heard of a worker."""
        return self._state.heartbeat_of(Ident("worker", worker_id))

    def on_change(self, callback: OnChange) -> Callable[[], None]:
        """Call `callback(kind, record)` now with "joined" for each live service, and at every change from then on.

        "changed" keeps id and epoch; a new epoch is "left" of the old and "joined" of the new. Returns a function
        that takes the callback back. It must not block; its exceptions are logged.
        """
        self._callbacks.append(callback)
        for record in list(self._state.live.values()):
            _tell(callback, "joined", record)
        return lambda: self._callbacks.remove(callback)

    async def wait_for(self, predicate: Callable[["Fleet"], bool], timeout_s: float) -> None:
        """Return once `predicate(self)` is true; raises TimeoutError."""
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self):
                    await changed.wait()
                    changed.clear()
        finally:
            self._waiters.discard(changed)

    async def first_beats(self) -> None:
        """Return once every service that has a record has been heard, or had the time to be: who isn't live by then
        isn't there. For those who are asked about the fleet from their first moment on."""
        with contextlib.suppress(TimeoutError):
            await self.wait_for(lambda fleet: fleet._state.is_all_live, FIRST_BEATS_TIMEOUT_S)

    # What the record watch tells (bus.record_watch.RecordSink).

    def put(self, key: str, record: Record) -> None:
        self._apply(self._state.put(key, record, time.monotonic()))

    def delete(self, key: str) -> None:
        self._apply(self._state.delete(key, time.monotonic()))

    def expire(self, key: str) -> None:
        self._apply(self._state.expire(key, time.monotonic()))

    def snapshot(self, keys: set[str]) -> None:
        self._apply(self._state.snapshot(keys, time.monotonic()))

    # What the line tells.

    def on_heartbeat(self, subject: str, payload: bytes) -> None:
        """Take a heartbeat; the service is in its subject."""
        service = subject.split(".")[3]
        self._apply(self._state.beat(service, decode(payload, Heartbeat), time.monotonic()))

    def on_echo(self, subject: str, payload: bytes) -> None:
        """The probe came back: the line is good."""
        self._echoed_at = time.monotonic()
        if not self._is_line_good:
            self._is_line_good = True
            self._state.line_up(self._echoed_at)

    async def run(self) -> None:
        """Probe the line and judge the fleet until cancelled."""
        while True:
            now = time.monotonic()
            if not self._bus.is_connected or now - self._echoed_at > LINE_LATE_S:
                self._is_line_good = False
                self._state.line_down()
            self._apply(self._state.tick(now))
            if self._bus.is_connected:
                with contextlib.suppress(BusUnavailableError):
                    await self._bus.publish(self.echo_subject, b"")
            await asyncio.sleep(TICK_EVERY_S)

    @property
    def echo_subject(self) -> str:
        return f"{self._bus.inbox}.echo.{id(self)}"

    def _apply(self, changes: list[Change]) -> None:
        for kind, record in changes:
            self._list(kind, record)
            for callback in list(self._callbacks):
                _tell(callback, kind, record)
        for waiter in self._waiters:
            waiter.set()

    def _list(self, kind: ChangeKind, record: Record) -> None:
        if isinstance(record, RuntimeConfig):
            if kind == "left":
                self.workers.pop(record.worker_id, None)
            else:
                self.workers[record.worker_id] = record
            return
        listed = self.routers if record.service == "router" else self.gateways
        if kind == "left":
            listed.pop(record.id, None)
        else:
            listed[record.id] = record


@contextlib.asynccontextmanager
async def watch(bus: Bus, *, timeout_s: float = FIRST_SNAPSHOT_TIMEOUT_S) -> AsyncIterator[Fleet]:
    """Watch the fleet for the length of the block, through every outage; the records are there at its start.

    Who is live shows within half a second more, as heartbeats come in. Raises BusUnavailableError when JetStream
    can't be reached within `timeout_s` at the start.
    """
    fleet = Fleet(bus)
    has_snapshot = asyncio.Event()
    async with open_scope() as scope:
        heartbeats = await bus.listen(bus.subjects.all_heartbeats, fleet.on_heartbeat)
        echoes = await bus.listen(fleet.echo_subject, fleet.on_echo)
        scope.spawn(fleet.run(), "fleet")
        scope.spawn(keep_watching(bus, fleet, has_snapshot), "record watch")
        try:
            async with asyncio.timeout(timeout_s):
                await has_snapshot.wait()
        except TimeoutError:
            raise BusUnavailableError("no snapshot of the fleet: is JetStream enabled?") from None
        try:
            yield fleet
        finally:
            await heartbeats.stop()
            await echoes.stop()


def _tell(callback: OnChange, kind: ChangeKind, record: Record) -> None:
    try:
        callback(kind, record)
    except Exception:
        logger.exception("on_change callback failed")
