"""A fleet of real processes on one nats-server, with as many routers and gateways as wanted: what `busway serve` runs,
multiplied. Members are named by what they are: g* gateway, r* router, p* prefill, d* decode (all with the sim engine).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import aiohttp
import psutil

from bus.client import Client
from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.fleet_state import ChangeKind
from bus.server import NatsServer
from deploy.service import LAUNCHER_VARIABLE, ServiceName
from deploy.settings import Settings, environment_of
from schemas.errors import BuswayError
from schemas.explanation import Choice, ExplainRequest, Explanation
from schemas.hop import Ok
from schemas.ids import RequestId
from schemas.worker import LoadReport, Record, RuntimeConfig
from services.config import BusConfig, GatewayConfig, PolicyName, RoleName, RouterConfig, WorkerConfig
from services.telemetry import LogConfig

SERVICES: dict[str, ServiceName] = {"g": "gateway", "r": "router", "p": "worker", "d": "worker"}
ROLES: dict[str, RoleName] = {"p": "prefill", "d": "decode"}
MODEL = "sim"
POLL_S = 0.05


class LiveFleet:
    """Made by `live_fleet`. `client` sends requests over the bus, `session` to the gateways' `urls`."""

    def __init__(self, server: NatsServer, folder: Path, policy: PolicyName, engine_args: dict[str, str]) -> None:
        self.bus: Bus
        self.fleet: Fleet
        self.client: Client
        self.session: aiohttp.ClientSession
        self._server = server
        self._folder = folder
        self._policy: PolicyName = policy
        self._engine_args = engine_args
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        """The gateways' addresses."""
        return [record.url for _, record in sorted(self.fleet.gateways.items())]

    def pids(self, kind: str) -> list[int]:
        """Return the processes of one kind ("g", "r", "p", "d")."""
        return [process.pid for name, process in self._processes.items() if name.startswith(kind)]

    def cpu_s(self, kind: str) -> float:
        """Return the seconds of CPU that the processes of a kind have used so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids(kind)]
        return sum(one.user + one.system for one in times)

    def rss_mib(self, kind: str) -> float:
        """Return the resident memory of the processes of a kind."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids(kind)) / 2**20

    def start(self, *names: str) -> None:
        """Start members; `until_live` waits for them."""
        for name in names:
            environ = {key: value for key, value in os.environ.items() if not key.startswith("BUSWAY_")}
            environ |= environment_of(self._settings(name)) | {LAUNCHER_VARIABLE: str(os.getpid())}
            with (self._folder / name).open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "deploy.child_main", SERVICES[name[0]], name],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def kill(self, name: str) -> None:
        """SIGKILL a member, and reap it."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    async def until_live(self, timeout_s: float) -> None:
        """Return once every member is in the fleet and ready, and every gateway says that the model is served."""
        names = set(self._processes)
        async with asyncio.timeout(timeout_s):
            while not names <= self._ready() or not await self._are_ready(self.urls):
                self._check_alive()
                await asyncio.sleep(POLL_S)

    async def loads(self, kind: str) -> dict[str, LoadReport]:
        """Return what each worker of a kind says of itself."""
        subjects = {name: self.bus.subjects.worker(name, "load") for name in self._processes if name.startswith(kind)}
        return {name: await self.bus.ask(one, Ok(), LoadReport, timeout_s=5.0) for name, one in subjects.items()}

    async def choices(self, request_id: RequestId) -> tuple[Choice, ...]:
        """Return how a request was routed, as the router that did it explains; none when nobody knows (any more)."""
        for router in sorted(self.fleet.routers):
            with contextlib.suppress(BuswayError):
                subject = self.bus.subjects.router(router, "explain")
                explanation = await self.bus.ask(subject, ExplainRequest(id=request_id), Explanation)
                if explanation.choices:
                    return explanation.choices
        return ()

    def stop(self) -> None:
        """Let everybody leave; who takes longer than a while is killed."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ready(self) -> set[str]:
        fleet = self.fleet
        records: list[Record] = [*fleet.workers.values(), *fleet.routers.values(), *fleet.gateways.values()]
        return {_id(record) for record in records if record.state == "ready"}

    async def _are_ready(self, urls: Iterable[str]) -> bool:
        for url in urls:
            async with self.session.get(f"{url}/ready") as response:
                if response.status != 200:
                    return False
        return True

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(
                    f"{name} ended with {process.returncode}: {(self._folder / name).read_text()[-2000:]}"
                )

    def _settings(self, name: str) -> Settings:
        return Settings(
            nats=BusConfig(url=self._server.internal_url),
            gateway=GatewayConfig(id=name, port=0, drain_s=5.0),
            router=RouterConfig(id=name, policy=self._policy, drain_s=5.0),
            worker=WorkerConfig(
                id=name,
                role=ROLES.get(name[0], "both"),
                engine="sim",
                transfer="shm",
                drain_s=5.0,
                engine_args=self._engine_args,
            ),
            log=LogConfig(level="warning"),
        )


@contextlib.asynccontextmanager
async def live_fleet(
    *names: str, policy: PolicyName = "kv", engine_args: dict[str, str] | None = None, timeout_s: float = 120.0
) -> AsyncIterator[LiveFleet]:
    """Run these members for the length of the block; they are live when it begins."""
    async with contextlib.AsyncExitStack() as context:
        folder = Path(context.enter_context(tempfile.TemporaryDirectory(prefix="busway-fleet-")))
        server = await context.enter_async_context(NatsServer())
        here = LiveFleet(server, folder, policy, engine_args or {})
        here.bus = await context.enter_async_context(
            Bus.connect(server.internal_url, name="bench", client_id=f"bench{os.getpid()}")
        )
        here.fleet = await context.enter_async_context(watch(here.bus))
        here.client = Client(here.bus)
        await here.client.start()
        here.fleet.on_change(_telling(here.client))
        connector = aiohttp.TCPConnector(limit=0)
        here.session = await context.enter_async_context(aiohttp.ClientSession(connector=connector))
        context.callback(here.stop)
        here.start(*names)
        await here.until_live(timeout_s)
        yield here


def names_of(**numbers: int) -> list[str]:
    """Return the names of so many members of each kind: names_of(p=2, d=2) is p0, p1, d0, d1."""
    return [f"{kind}{number}" for kind, count in numbers.items() for number in range(count)]


def _id(record: Record) -> str:
    return record.worker_id if isinstance(record, RuntimeConfig) else record.id


def _telling(client: Client) -> Callable[[ChangeKind, Record], None]:
    def on_change(kind: ChangeKind, record: Record) -> None:
        if kind == "left":
            client.holder_left(_id(record))

    return on_change
