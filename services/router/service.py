"""The router process: joins the fleet, routes until told to stop, then leaves without losing a request."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from importlib.metadata import version

import msgspec

from bus.connection import Bus
from bus.discovery import register, watch
from bus.patiently import START_PATIENCE_S
from bus.scope import open_scope
from schemas.explanation import ExplainRequest
from schemas.hop import Abort, Resend
from schemas.ids import Epoch
from schemas.worker import ServiceRecord
from services.config import RouterConfig
from services.router.fleet_watch import FleetWatch
from services.router.kv_sync import KvSync
from services.router.reporter import Reporter
from services.router.router import PrefillRouter

GIVE_UP_S = 2.0


async def run_router(
    bus: Bus, config: RouterConfig, *, stop: asyncio.Event, ready: Callable[[PrefillRouter], None]
) -> None:
    """Serve until `stop` is set, then take nothing new and return once everything held has been handed over (at most
    `config.drain_s`). `ready` gets the serving router. Raises TakenOverError when another process took its id."""
    record = _record(config)
    async with watch(bus, timeout_s=START_PATIENCE_S) as fleet:
        router = PrefillRouter(bus, config, fleet, record)
        fleet_watch = FleetWatch(bus, fleet, router)
        fleet.on_change(fleet_watch.on_change)
        sync = None if router.kv is None else KvSync(bus, router.kv)
        if sync is not None:
            fleet.on_change(sync.on_change)
            await bus.listen(bus.subjects.all_kv_events, sync.on_events)
        await bus.listen(bus.subjects.all_loads, router.on_load)
        await bus.listen(router.result_subject, router.on_result)
        await bus.serve(bus.subjects.router(record.id, "abort"), Abort, router.on_abort)
        await bus.serve(bus.subjects.router(record.id, "resend"), Resend, router.on_resend)
        await bus.serve(bus.subjects.router(record.id, "explain"), ExplainRequest, router.on_explain)
        await bus.announce("router", version("busway"), {"policy": config.policy})
        await fleet.first_beats()  # else the first requests would hear that nobody serves their model
        async with (
            open_scope() as scope,
            register(bus, record, lambda: (router.num_routed, False)) as registration,
        ):
            scope.spawn(fleet_watch.run(), "fleet watch")
            scope.spawn(Reporter(bus, router.tally, router=record.id, epoch=record.epoch).run(), "report")
            if sync is not None:
                scope.spawn(sync.run(), "KV sync")
            ready(router)
            await stop.wait()
            await registration.update(msgspec.structs.replace(record, state="draining"))
            await fleet_watch.stop_taking()
            await _drain(router, config.drain_s)


def _record(config: RouterConfig) -> ServiceRecord:
    host = socket.gethostname()
    return ServiceRecord(
        service="router",
        id=config.id or f"{host}-router-{secrets.token_hex(3)}",
        epoch=Epoch(time.time_ns()),
        state="ready",
        host=host,
        pid=os.getpid(),
        is_strict=config.is_strict,
    )


async def _drain(router: PrefillRouter, drain_s: float) -> None:
    for limit_s in (drain_s, GIVE_UP_S):
        try:
            async with asyncio.timeout(limit_s):
                return await router.wait_idle()
        except TimeoutError:
            router.give_up()
