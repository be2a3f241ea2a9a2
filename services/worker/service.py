"""The worker process: an engine warms up, joins the fleet, serves in one role after the other until told to stop, and
leaves when it holds nothing that anyone still needs.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version

import msgspec

from bus.cards import keep_card, publish_card
from bus.connection import Bus
from bus.discovery import Fleet, Registration, register, watch
from bus.patiently import START_PATIENCE_S
from bus.scope import Scope, open_scope
from bus.serving import Call
from schemas.errors import EngineError, RequestError, UnavailableError
from schemas.hop import Abort, AcceptedHop, ChangeRole, Drain, Ok, Resend
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
from services.worker.orders import Orders
from services.worker.outlet import Outlet
from services.worker.peers import BusPeerLink, PeerWatch, serve_peers
from services.worker.quarantine import QuarantineWatch
from services.worker.tenure import Tenure

logger = logging.getLogger(__name__)


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
        self._orders = Orders()
        self._failure: EngineError | None = None

    async def run(self, ready: Callable[[RuntimeConfig], None]) -> None:
        async with open_scope() as scope:
            scope.spawn(self._run_engine(), "engine")
            scope.spawn(self._forward_stop(), "stop")
            if await self._orders.unless_told_to_leave(self._profile):
                profile = await self._profile
                me = runtime_config(self._config, profile, self._id, self._epoch)
                async with _metrics(self._config.metrics_listen, me, profile) as url:
                    await self._serve(scope, profile, msgspec.structs.replace(me, metrics_url=url), ready)
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
        self._orders.leave(None)

    async def _forward_stop(self) -> None:
        await self._stop.wait()
        self._orders.leave(None)

    def _emit(self, events: Sequence[EngineEvent]) -> None:
        if self._desk is not None and self._kv is not None:
            self._kv.take(events)
            self._desk.emit(events)

    async def _serve(
        self, scope: Scope, profile: EngineProfile, me: RuntimeConfig, ready: Callable[[RuntimeConfig], None]
    ) -> None:
        kv = self._kv = KvTeller(self._bus, me)
        loads = LoadReporter(self._bus, self._engine, kv, model=me.model, worker=self._id, epoch=self._epoch)
        desk = self._desk = LegDesk(self._engine, me, self._outlet, loads)
        await publish_card(self._bus, profile.card)
        listeners = ListenerWatch(self._bus, desk.ledger, desk.listener_left)
        for job in (self._outlet, kv, loads, desk.deadlines, desk.stall, listeners):
            scope.spawn(job.run(), type(job).__name__)
        scope.spawn(keep_card(self._bus, profile.card), "model card")
        scope.spawn(QuarantineWatch(self._engine.load, self._worn).run(), "quarantine watch")
        await self._subscribe(desk, loads, profile)
        tenure = Tenure(self._bus, desk, self._outlet, me)
        await tenure.open()
        async with watch(self._bus, timeout_s=START_PATIENCE_S) as fleet:
            peers = PeerWatch(self._engine, me)
            fleet.on_change(peers.on_change)
            fleet.on_change(lambda kind, record: _owner_left(desk, kind, record))
            await self._bus.announce("worker", version("busway"), {"role": me.role, "model": me.model})
            async with register(self._bus, me, self._beat) as registration:
                ready(me)
                await self._serve_in_roles(tenure, registration, peers, fleet)
        self._orders.has_left.set()

    async def _subscribe(self, desk: LegDesk, loads: LoadReporter, profile: EngineProfile) -> None:
        """Subscribe to this worker's subjects but those on which legs come."""
        bus, subjects = self._bus, self._bus.subjects

        async def load(query: Ok, call: Call) -> LoadReport:
            return loads.report()

        async def drain(order: Drain, call: Call) -> AcceptedHop:
            self._orders.leave(order.grace_s)
            await self._orders.has_left.wait()
            return AcceptedHop(by=self._id, epoch=self._epoch)

        async def change_role(order: ChangeRole, call: Call) -> AcceptedHop:
            if not profile.can_change_role:
                raise RequestError(f"a {profile.backend} engine can't change its role: start another", param="role")
            await self._orders.change_role(order.role, order.grace_s)
            return AcceptedHop(by=self._id, epoch=self._epoch)

        await serve_peers(bus, self._engine, self._id)
        if self._kv is not None:
            await bus.serve(subjects.peer(self._id, "kv_snapshot"), KvSnapshotRequest, self._kv.on_snapshot)
        await bus.serve(subjects.worker(self._id, "abort"), Abort, desk.on_abort)
        await bus.serve(subjects.worker(self._id, "resend"), Resend, desk.on_resend)
        await bus.serve(subjects.worker(self._id, "load"), Ok, load)
        await bus.serve(subjects.admin(self._id, "drain"), Drain, drain)
        await bus.serve(subjects.admin(self._id, "role"), ChangeRole, change_role)

    async def _serve_in_roles(self, tenure: Tenure, registration: Registration, peers: PeerWatch, fleet: Fleet) -> None:
        """Serve in one role after the other, until told to leave; then end."""
        while (order := await self._orders.next()) is not None:
            if order.role == tenure.me.role:
                order.done.set_result(None)
                continue
            if not await tenure.end(registration, self._limit_s(order.grace_s), unless=self._orders.leave_asked):
                order.done.set_exception(UnavailableError("the worker is leaving"))
                break
            await tenure.close()
            tenure = tenure.in_role(order.role)
            peers.become(tenure.me, fleet.workers.values())
            await tenure.open()
            await registration.update(tenure.me)
            logger.info("%s serves as %s now", self._id, order.role)
            order.done.set_result(None)
        await tenure.end(registration, self._limit_s(self._orders.grace_s))

    def _limit_s(self, grace_s: float | None) -> float:
        return self._config.drain_s if grace_s is None else grace_s

    def _beat(self) -> tuple[int, bool]:
        load = self._engine.load()
        return load.progress, load.running + load.waiting > 0


@contextlib.asynccontextmanager
async def _metrics(listen: str, me: RuntimeConfig, profile: EngineProfile) -> AsyncIterator[str]:
    """Serve /metrics where the settings say so, and yield its URL; the import costs a start that doesn't."""
    if not listen:
        yield ""
        return
    from services.worker.metrics import open_metrics

    async with open_metrics(listen, me, profile.own_metrics) as url:
        yield url


def _owner_left(desk: LegDesk, kind: str, record: Record) -> None:
    if kind == "left" and not isinstance(record, RuntimeConfig):
        desk.owner_left(record.id)
