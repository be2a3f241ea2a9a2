"""One service as a process: its settings, logging, connection, signals, readiness and exit."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

from deploy.display import describe
from deploy.engine_python import move_to_engine
from deploy.errors import UsageError
from deploy.failures import in_words
from deploy.imports import import_bus
from deploy.model_choice import with_model
from deploy.notify import notify
from deploy.processes import die_with_parent
from deploy.settings import Resolved, Settings
from services.telemetry import setup_logging

if TYPE_CHECKING:
    from bus.connection import Bus

LAUNCHER_VARIABLE = "BUSWAY_LAUNCHER_PID"
SIGNALS = (signal.SIGTERM, signal.SIGINT)

ServiceName = Literal["gateway", "router", "worker"]

log = logging.getLogger(__name__)


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """`stop` is set when the service is to drain and return; `ready` is told where or what it is once it serves."""

    stop: asyncio.Event
    ready: Callable[[str], None]


def run_service(resolved: Resolved, service: ServiceName) -> None:
    """Run a service until it has drained after SIGTERM or SIGINT; its errors propagate.

    Under `busway serve` the process dies with its launcher.
    """
    if service == "worker":
        move_to_engine(resolved.settings)
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")
    if launcher:
        die_with_parent(int(launcher))
    resolved = _completed(resolved, service)
    id = getattr(resolved.settings, service).id
    setup_logging(resolved.settings.log, service=id)
    if not resolved.settings.nats.url:
        raise UsageError("no NATS to connect to: give --nats-url or BUSWAY_NATS_URL, or run `busway serve` here first")
    for line in describe(resolved, ("nats", service, "log")):
        log.log(logging.DEBUG if launcher else logging.INFO, "config %s", line)  # the launcher has shown it

    import uvloop

    try:
        uvloop.run(_live(resolved.settings, service, id))
    except Exception as error:
        raise in_words(error, id) from error


def _completed(resolved: Resolved, service: ServiceName) -> Resolved:
    """Return the settings with what only this process can choose: a fresh id, and the model's folder."""
    config = getattr(resolved.settings, service)
    prefix: str = service
    if service == "worker":
        config, prefix = with_model(config), config.role
    if not config.id:
        config = msgspec.structs.replace(config, id=f"{prefix}-{secrets.token_hex(3)}")
    settings = msgspec.structs.replace(resolved.settings, **{service: config})
    return msgspec.structs.replace(resolved, settings=settings)


async def _live(settings: Settings, service: ServiceName, id: str) -> None:
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, _leave, stop, id)
    await SERVE[service](settings, Lifetime(stop=stop, ready=lambda text: _ready(id, text)))
    log.info("%s has left", id)


def _leave(stop: asyncio.Event, id: str) -> None:
    """Begin to drain; a second signal ends the process the usual way."""
    log.info("%s is draining", id)
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
    notify("STOPPING=1")
    stop.set()


def _ready(id: str, text: str) -> None:
    log.info("%s is ready: %s", id, text)
    notify("READY=1", f"STATUS={text}", f"MAINPID={os.getpid()}")


@asynccontextmanager
async def _bus(settings: Settings, id: str) -> AsyncIterator["Bus"]:
    from bus.connection import Bus

    nats = settings.nats
    async with Bus.connect(nats.url, name=id, client_id=id, namespace=nats.namespace, replicas=nats.replicas) as bus:
        yield bus


async def _gateway(settings: Settings, life: Lifetime) -> None:
    from services.gateway.service import run_gateway

    async with _bus(settings, settings.gateway.id) as bus:
        await run_gateway(bus, settings.gateway, stop=life.stop, ready=life.ready)


async def _router(settings: Settings, life: Lifetime) -> None:
    import_bus(settings.nats.url)
    from services.router.service import run_router

    async with _bus(settings, settings.router.id) as bus:
        await run_router(bus, settings.router, stop=life.stop, ready=lambda router: life.ready(router.id))


async def _worker(settings: Settings, life: Lifetime) -> None:
    # OpenMP threads that spin at barriers starve the other workers of a machine: with 1P1D on 2 cores a token took
    # ten times as long. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import_bus(settings.nats.url)
    from services.engines.registry import make_engine
    from services.worker.service import run_worker

    async with _bus(settings, settings.worker.id) as bus:
        engine = make_engine(settings.worker, is_one_host=bus.is_one_host)
        await run_worker(
            bus,
            settings.worker,
            engine,
            stop=life.stop,
            ready=lambda it: life.ready(f"{it.role} worker of {it.model}, {it.total_kv_blocks} KV blocks"),
        )


SERVE: dict[ServiceName, Callable[[Settings, Lifetime], Awaitable[None]]] = {
    "gateway": _gateway,
    "router": _router,
    "worker": _worker,
}
