"""A gateway from start to drain: discovery, registration, NATS and HTTP fronts, in the order that loses no request."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import msgspec
from aiohttp import web

from bus.client import Client
from bus.connection import Bus
from bus.discovery import Fleet, register, watch
from bus.fleet_state import ChangeKind
from bus.patiently import START_PATIENCE_S
from bus.scope import open_scope
from schemas.errors import RequestError
from schemas.ids import Epoch
from schemas.trace import TraceRequest
from schemas.worker import Record, RuntimeConfig, ServiceRecord
from services.config import GatewayConfig
from services.gateway.answering import Answering
from services.gateway.bus_front import BusFront
from services.gateway.encoding import EncodingThreads
from services.gateway.explaining import Explainer
from services.gateway.fleet_metrics import FleetMetrics
from services.gateway.http_app import Routes
from services.gateway.http_reply import Pacemaker
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ModelDirectory
from services.gateway.router_metrics import RouterMetrics
from services.gateway.traces import TraceLog
from services.gateway.walk import Walk

# Idle connections outlive those of the load balancers in front (60 s by default).
KEEPALIVE_TIMEOUT_S = 75.0
# What handlers get after the drain: every request has been answered by then, or told that it won't be.
SHUTDOWN_S = 1.0


async def run_gateway(bus: Bus, config: GatewayConfig, *, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set, then take nothing new, let running answers end (at most drain_s) and return.

    `ready` gets the URL; port 0 takes a free one. Raises OSError when the address is taken, TakenOverError when
    another process took this gateway's id.
    """
    record = _record(config)
    with EncodingThreads() as threads:
        async with watch(bus, timeout_s=START_PATIENCE_S) as fleet:
            await fleet.first_beats()  # else the first requests would hear that there is no such model
            gateway = await _assemble(bus, fleet, threads, config, record.id)
            async with (
                _exporting(gateway.traces, config, record.id),
                open_scope() as scope,
                _listening(gateway.routes.application(), config) as (site, url),
            ):
                scope.spawn(gateway.pacemaker.run(), "pacemaker")
                scope.spawn(gateway.front.run(), "bus front")
                record = msgspec.structs.replace(record, url=url)
                async with register(bus, record, lambda: (gateway.metrics.num_ended, False)) as place:
                    await bus.announce("gateway", version("busway"), {"url": url})
                    ready(url)
                    await stop.wait()
                    await place.update(msgspec.structs.replace(record, state="draining"))
                    await gateway.front.stop()
                    await site.stop()
                    await gateway.answering.drain(config.drain_s)


@dataclass(frozen=True, slots=True)
class _Gateway:
    """The parts that run_gateway starts and stops."""

    metrics: GatewayMetrics
    traces: TraceLog
    answering: Answering
    front: BusFront
    pacemaker: Pacemaker
    routes: Routes


async def _assemble(
    bus: Bus, fleet: Fleet, threads: EncodingThreads, config: GatewayConfig, gateway_id: str
) -> _Gateway:
    metrics = GatewayMetrics()
    fleet_metrics = FleetMetrics(fleet.workers, lambda: len(fleet.routers))
    metrics.registry.register(fleet_metrics)
    await bus.listen(bus.subjects.all_loads, fleet_metrics.hear)
    router_metrics = RouterMetrics(lambda: fleet.routers)
    metrics.registry.register(router_metrics)
    await bus.listen(bus.subjects.all_router_reports, router_metrics.hear)
    client = Client(bus, owner=gateway_id, on_resubmit=metrics.resumed, on_resend=metrics.resent)
    await client.start()
    fleet.on_change(partial(_tell_who_left, client, fleet_metrics))
    models = ModelDirectory(bus, fleet, threads)
    walk = Walk(models=models, client=client, threads=threads, metrics=metrics, explainer=Explainer(bus), config=config)
    traces = TraceLog(gateway_id)
    await bus.serve(bus.subjects.gateway(gateway_id, "trace"), TraceRequest, traces.on_trace)
    answering = Answering(walk, metrics, traces, request_timeout_s=config.request_timeout_s)
    front = BusFront(bus, models, answering)
    pacemaker = Pacemaker(config.keepalive_s)
    routes = Routes(
        answering=answering,
        models=models,
        registry=metrics.registry,
        pacemaker=pacemaker,
        max_body_bytes=config.max_body_bytes,
    )
    models.start()
    return _Gateway(metrics, traces, answering, front, pacemaker, routes)


def _tell_who_left(client: Client, fleet_metrics: FleetMetrics, kind: ChangeKind, record: Record) -> None:
    if kind == "left":
        client.holder_left(record.worker_id if isinstance(record, RuntimeConfig) else record.id)
        if isinstance(record, RuntimeConfig):
            fleet_metrics.forget(record.worker_id)


def _record(config: GatewayConfig) -> ServiceRecord:
    host = socket.gethostname()
    return ServiceRecord(
        service="gateway",
        id=config.id or f"{host}-gateway-{secrets.token_hex(3)}",
        epoch=Epoch(time.time_ns()),
        state="ready",
        host=host,
        pid=os.getpid(),
    )


@asynccontextmanager
async def _exporting(traces: TraceLog, config: GatewayConfig, gateway_id: str) -> AsyncIterator[None]:
    """Send a span for each phase of each request where `config.otlp_endpoint` says, for the length of the block."""
    if not config.otlp_endpoint:
        yield
        return
    try:
        from services.gateway.span_export import span_export
    except ModuleNotFoundError as error:
        raise RequestError(
            f"gateway.otlp_endpoint: OpenTelemetry isn't installed ({error.name}): pip install 'busway[otel]'",
            param="gateway.otlp_endpoint",
        ) from error
    async with span_export(config.otlp_endpoint, gateway_id) as export:
        traces.on_end = export.export
        yield


@asynccontextmanager
async def _listening(app: web.Application, config: GatewayConfig) -> AsyncIterator[tuple[web.TCPSite, str]]:
    """Serve HTTP for the length of the block; yields the site and its URL.

    A handler is cancelled when its client's connection is lost: that is how a disconnect aborts a request at once.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        host, port, *_ = runner.addresses[0]
        yield site, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()
