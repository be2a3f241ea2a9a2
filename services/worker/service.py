"""The worker process: an engine warms up, joins the fleet, serves until told to stop, and leaves when it holds nothing
that anyone still needs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from bus.cards import publish_card
from bus.connection import Bus
from bus.discovery import Registration, register, watch
from bus.scope import Scope, open_scope
from bus.serving import Call, Serving
from schemas.errors import EngineError, WorkerLostError
from schemas.hop import Abort, AcceptedHop, DecodeRequest, Drain, Ok, PrefillRequest, Resend
from schemas.ids import Epoch
from schemas.kv_events import KvSnapshotRequest
from schemas.worker import LoadReport, Record, RuntimeConfig
from services.config import WorkerConfig
from services.engines.protocol import Engine, EngineEvent, EngineProfile
from services.worker.identity import runtime_config, worker_id
from services.worker.kv_teller import KvTeller
from services.worker.legs import LegDesk
from services.worker.listeners import ListenerWatch
from services.worker.load import LoadReporter
from services.worker.outlet import Outlet
from services.worker.peers import BusPeerLink, PeerWatch, serve_peers
from services.worker.quarantine import QuarantineWatch

logger = logging.getLogger(__name__)

POLL_S = 0.02


async def run_worker(
    bus: Bus,
    config: WorkerConfig,
    engine: Engine,
    *,
    stop: asyncio.Event,
    ready: Callable[[RuntimeConfig], None],
) -> None:
    """Serve until `stop` is set or an admin's drain; then take nothing new and return once all that is held has ended
    and been fetched (at most `config.drain_s`). `ready` gets the discovery record once the worker is in the fleet.

    Raises what the engine's `run` raises, and TakenOverError when another process took this worker's id.
    """
    await _Worker(bus, config, engine, stop).run(ready)


class _Worker:
    def __init__(self, bus: Bus, config: WorkerConfig, engine: Engine, stop: asyncio.Event) -> None:
        self._bus = bus
        self._config = config
        self._engine = engine
        self._stop = stop
        self._id = worker_id(config)
        self._epoch = Epoch(time.time_ns())
        self._outlet = Outlet(bus)
        self._profile: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
        self._desk: LegDesk | None = None
        self._kv: KvTeller | None = None
        self._drain = _DrainDesk()
        self._failure: EngineError | None = None

    async def run(self, ready: Callable[[RuntimeConfig], None]) -> None:
        async with open_scope() as scope:
            scope.spawn(self._run_engine(), "engine")
            scope.spawn(self._forward_stop(), "stop")
            if await self._drain.unless_asked(self._profile):
                await self._serve(scope, await self._profile, ready)
        if self._failure is not None:
            raise self._failure

    async def _run_engine(self) -> None:
        """Run the engine; when it dies, tell all who wait for it before the process goes."""
        try:
            await self._engine.run(
                worker=self._id,
                epoch=self._epoch,
                peers=BusPeerLink(self._bus),
                emit=self._emit,
                ready=self._profile.set_result,
            )
            raise EngineError("the engine ended by itself")
        except Exception as error:
            if self._desk is not None:
                self._desk.engine_died(error)
                await self._outlet.flush()
            raise

    def _worn(self, error: EngineError) -> None:
        """Let what is held end as in any drain, but leave with an error, so that a supervisor starts us afresh."""
        logger.error("leaving: %s", error.message)
        self._failure = error
        self._drain.begin(None)

    async def _forward_stop(self) -> None:
        await self._stop.wait()
        self._drain.begin(None)

    def _emit(self, events: Sequence[EngineEvent]) -> None:
        if self._desk is not None and self._kv is not None:
            self._kv.take(events)
            self._desk.emit(events)

    async def _serve(self, scope: Scope, profile: EngineProfile, ready: Callable[[RuntimeConfig], None]) -> None:
        me = runtime_config(self._config, profile, self._id, self._epoch)
        kv = self._kv = KvTeller(self._bus, me)
        loads = LoadReporter(self._bus, self._engine, kv, model=me.model, worker=self._id, epoch=self._epoch)
        desk = self._desk = LegDesk(self._engine, me, self._outlet, loads)
        await publish_card(self._bus, profile.card)
        listeners = ListenerWatch(self._bus, desk.ledger, desk.listener_left)
        for job in (self._outlet, kv, loads, desk.deadlines, desk.stall, listeners):
            scope.spawn(job.run(), type(job).__name__)
        scope.spawn(QuarantineWatch(self._engine.load, self._worn).run(), "quarantine watch")
        groups = await self._subscribe(desk, loads, me)
        async with watch(self._bus) as fleet:
            fleet.on_change(PeerWatch(self._engine, me).on_change)
            fleet.on_change(lambda kind, record: _owner_left(desk, kind, record))
            await self._bus.announce("worker", version("busway"), {"role": me.role, "model": me.model})
            async with register(self._bus, me, self._beat) as registration:
                ready(me)
                await self._drain.asked.wait()
                await self._leave(desk, registration, groups)
        self._drain.is_over.set()

    async def _subscribe(self, desk: LegDesk, loads: LoadReporter, me: RuntimeConfig) -> list[Serving]:
        """Subscribe to all of this worker's subjects; return the queue groups', which end first."""
        bus, subjects = self._bus, self._bus.subjects

        async def load(query: Ok, call: Call) -> LoadReport:
            return loads.report()

        async def drain(order: Drain, call: Call) -> AcceptedHop:
            self._drain.begin(order.grace_s)
            await self._drain.is_over.wait()
            return AcceptedHop(by=me.worker_id, epoch=me.epoch)

        await serve_peers(bus, self._engine, self._id)
        if self._kv is not None:
            await bus.serve(subjects.peer(self._id, "kv_snapshot"), KvSnapshotRequest, self._kv.on_snapshot)
        await bus.serve(subjects.worker(self._id, "abort"), Abort, desk.on_abort)
        await bus.serve(subjects.worker(self._id, "resend"), Resend, desk.on_resend)
        await bus.serve(subjects.worker(self._id, "load"), Ok, load)
        await bus.serve(subjects.admin(self._id, "drain"), Drain, drain)
        groups: list[Serving] = []
        if me.role == "prefill":
            await bus.serve(subjects.worker(self._id, "prefill"), PrefillRequest, desk.on_prefill)
            group = subjects.prefill(me.model, me.compat)
            groups.append(await bus.serve(group, PrefillRequest, desk.on_prefill, queue="prefill"))
        else:
            await bus.serve(subjects.worker(self._id, "decode"), DecodeRequest, desk.on_decode)
            group = subjects.decode(me.model, me.compat)
            groups.append(await bus.serve(group, DecodeRequest, desk.on_decode, queue="decode"))
        return groups

    async def _leave(self, desk: LegDesk, registration: Registration, groups: list[Serving]) -> None:
        """Take no new work, let what is held end and be fetched, end the rest as lost."""
        desk.is_draining = True
        record = registration.record
        assert isinstance(record, RuntimeConfig)
        await registration.update(msgspec.structs.replace(record, state="draining"))
        for group in groups:
            await group.stop()
        limit_s = self._config.drain_s if self._drain.grace_s is None else self._drain.grace_s
        try:
            async with asyncio.timeout(limit_s):
                while not desk.is_idle:  # noqa: ASYNC110 (leases end in the engine, which has no event for it)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logger.warning("leaving with %d attempts unfinished after %.1f s", len(desk.ledger), limit_s)
            desk.drop_all(WorkerLostError(f"worker {self._id} had to leave"))
        await self._outlet.flush()

    def _beat(self) -> tuple[int, bool]:
        load = self._engine.load()
        return load.progress, load.running + load.waiting > 0


class _DrainDesk:
    """Who asked this worker to leave, and whether it has. The first to ask sets the grace."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_over = asyncio.Event()
        self.grace_s: float | None = None

    def begin(self, grace_s: float | None) -> None:
        if not self.asked.is_set():
            self.grace_s = grace_s
            self.asked.set()

    async def unless_asked(self, profile: "asyncio.Future[EngineProfile]") -> bool:
        """Wait for the engine; return False when the worker has to leave before it is ready."""
        async with open_scope() as scope:
            either: list[asyncio.Future[Any]] = [profile, scope.spawn(_wait(self.asked), "drain asked")]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return profile.done()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _owner_left(desk: LegDesk, kind: str, record: Record) -> None:
    if kind == "left" and not isinstance(record, RuntimeConfig):
        desk.owner_left(record.id)
