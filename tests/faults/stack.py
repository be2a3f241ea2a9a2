"""A stack of real processes that tests break and mend: nats-server, gateways, routers and workers with the sim engine.

Members are named by what they are: g* gateway, r* router, p* prefill, d* decode, b* both. One stack serves many tests:
`have` starts who is missing and lets go who isn't wanted, `all_free` proves that the last test left nothing behind.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import orjson

from bus.client import Client
from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.fleet_state import ChangeKind
from bus.server import NatsServer
from deploy.fleet import read_fleet
from deploy.service import ServiceName
from deploy.settings import Settings
from schemas.errors import BusError
from schemas.hop import Ok
from schemas.ids import WorkerId
from schemas.worker import LoadReport, Record, RuntimeConfig
from services.config import BusConfig, GatewayConfig, HandoffMode, RouterConfig, WorkerConfig
from services.telemetry import LogConfig
from tests.conftest import wait_until
from tests.faults.asking import Answer, Ask, Via, ask_bus, ask_http
from tests.faults.cluster import Cluster
from tests.faults.cost import Cost, Tally, cost_in
from tests.faults.member import Member, all_ended

SERVICES: dict[str, ServiceName] = {"g": "gateway", "r": "router", "p": "worker", "d": "worker", "b": "worker"}
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
LEASE_S = 2.0
DRAIN_S = 5.0
ENGINE_ARGS = {"num_blocks": "256", "max_num_seqs": "32", "max_context_tokens": "4000", "decode_ms_per_step": "3"}
GATEWAY_TUNING = {"request_timeout_s": 60.0, "gateway_drain_s": DRAIN_S}
FREE_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 40.0


def promptly(seconds: float) -> float:
    """Return a limit that a test sets: so many seconds, and more where other processes take the cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Stack:
    """Made by `run_stack`. `handoff` is that of all its workers."""

    def __init__(self, nats: BusConfig, handoff: HandoffMode, folder: Path) -> None:
        self.server: NatsServer
        self.handoff = handoff
        self.members: dict[str, Member] = {}
        self.bus: Bus
        self.fleet: Fleet
        self.client: Client
        self.session: aiohttp.ClientSession
        self.tally = Tally()
        self._nats = nats
        self._folder = folder
        self._tasks: asyncio.TaskGroup
        self._quiet: dict[int, Counter[str]] = {}
        self._answers: list[Answer] = []
        self._urls: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    # ---- members ----

    async def have(self, *names: str, **tuning: object) -> None:
        """Return once exactly these members run, see each other, and a request has gone all the way.

        `tuning` are engine arguments, or fields of WorkerConfig; `request_timeout_s` and `gateway_drain_s` are the
        gateways'. Who is tuned otherwise is started anew.
        """
        await self._forget_answers()
        unfit = [name for name, one in self.members.items() if name not in names or self._is_unfit(one, tuning)]
        await all_ended([self.members[name] for name in unfit])
        for name in names:
            self.start(name, **tuning)
        await self.settled(names)

    def start(self, name: str, **tuning: object) -> Member:
        """Start a member unless it runs."""
        member = self.members.get(name)
        if member is None:
            member = self.members[name] = Member(name, SERVICES[name[0]], Settings(), self._folder / name)
        if not member.is_running:
            member.settings = self._settings(name, tuning)
            member.start()
        return member

    async def settled(self, names: tuple[str, ...]) -> None:
        """Wait until these and no others live, and serve."""
        pids = {self.members[name].pid for name in names}
        await wait_until(
            lambda: {record.pid for record in self._live()} == pids,
            READY_TIMEOUT_S,
            lambda: f"wanted {names}, live are {[record.pid for record in self._live()]}: {self.logs()}",
        )
        if any(name[0] in "db" for name in names):
            await self._probed(names)
        await self.all_free()

    async def _probed(self, names: tuple[str, ...]) -> None:
        """Wait until requests take the way that these members make possible, through each gateway."""
        has_pair = any(name[0] == "p" for name in names) and any(name[0] == "d" for name in names)
        wanted = ["accepted", "prefilling", "decoding"] if has_pair else ["accepted", "decoding"]
        for gateway in ("", *(name for name in names if name[0] == "g")):
            answer: Answer | None = None
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    while answer is None or not answer.is_whole or (not gateway and answer.stages != wanted):
                        via: Via = "http" if gateway else "bus"
                        answer = await self.ask(self.prompt(40), 3, via=via, gateway=gateway).over()
                        await asyncio.sleep(0.02)
                    if gateway:
                        await self._listens(gateway)
            except TimeoutError:
                raise AssertionError(f"{names} don't serve: {answer}, {self.logs()}") from None

    async def _listens(self, gateway: str) -> None:
        """Wait until a gateway listens to the model's OpenAI subjects as well: it isn't idle before."""
        while True:
            with contextlib.suppress(BusError):
                info = await self.bus.ask(f"$SRV.INFO.busway-gateway.{gateway}", b"", bytes)
                if sum(".openai." in endpoint["subject"] for endpoint in orjson.loads(info)["endpoints"]) == 2:
                    return
            await asyncio.sleep(0.02)

    def _live(self) -> list[Record]:
        fleet = self.fleet
        return [*fleet.workers.values(), *fleet.routers.values(), *fleet.gateways.values()]

    def _is_unfit(self, member: Member, tuning: dict[str, object]) -> bool:
        wanted = self._settings(member.name, tuning)
        if member.service == "worker":
            return member.settings.worker != wanted.worker
        return member.service == "gateway" and member.settings.gateway != wanted.gateway

    def _settings(self, name: str, tuning: dict[str, object]) -> Settings:
        own = {key: value for key, value in tuning.items() if key in WorkerConfig.__struct_fields__}
        gateway = {key: float(tuning.get(key, default)) for key, default in GATEWAY_TUNING.items()}  # type: ignore[arg-type]
        engine_args = {key: str(value) for key, value in tuning.items() if key not in {*own, *gateway}}
        engine_args = ENGINE_ARGS | {"pause_dir": str(self._folder / name)} | engine_args
        worker = WorkerConfig(
            id=name,
            role=ROLES.get(name[0], "both"),  # type: ignore[arg-type]
            engine="sim",
            transfer="shm",
            handoff=self.handoff,
            lease_s=LEASE_S,
            drain_s=DRAIN_S,
            engine_args=engine_args,
        )
        return Settings(
            nats=self._nats,
            gateway=GatewayConfig(
                id=name,
                port=0,
                drain_s=gateway["gateway_drain_s"],
                request_timeout_s=gateway["request_timeout_s"],
            ),
            router=RouterConfig(id=name, drain_s=DRAIN_S),
            worker=msgspec.structs.replace(worker, **own),
            log=LogConfig(level="info"),
        )

    @contextlib.contextmanager
    def paused(self, point: str, *names: str) -> Iterator[None]:
        """Hold whatever comes to this pause point of these members for the length of the block."""
        with contextlib.ExitStack() as pauses:
            for name in names:
                pauses.enter_context(self.members[name].paused(point))
            yield

    async def until_gone(self, name: str) -> None:
        """Wait until the fleet has noticed that a member lives no more."""
        await wait_until(lambda: not any(_id(record) == name for record in self._live()), 20.0, lambda: f"{name} lives")

    async def until_live(self, name: str) -> None:
        """Wait until the fleet knows a member's present process as ready."""
        pid = self.members[name].pid
        await wait_until(
            lambda: any(record.pid == pid and record.state == "ready" for record in self._live()),
            READY_TIMEOUT_S,
            lambda: f"{name} doesn't join: {self.members[name].log()}",
        )

    async def until_state(self, worker: str, state: str) -> None:
        """Wait until a worker's record says so."""
        workers = self.fleet.workers
        await wait_until(
            lambda: WorkerId(worker) in workers and workers[WorkerId(worker)].state == state,
            READY_TIMEOUT_S,
            lambda: f"{worker} isn't {state}",
        )

    async def until_served_by(self, name: str, *, stage: str) -> None:
        """Ask until a worker has had this part of a request."""
        at = {"prefilling": -2, "decoding": -1}[stage]
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                answer = await self.ask(self.prompt(), 3).over()
                answer.check_whole()
                if stage in answer.stages and answer.holders[at] == name:
                    return

    async def states(self) -> dict[str, str]:
        """Return what `busway status` says of each worker ("gone": nothing any more)."""
        fleet = await read_fleet(self.bus)
        known = {row.worker_id: row.state for row in fleet.workers}
        return {name: known.get(name, "gone") for name in self.members}

    async def status_rows(self) -> dict[str, str]:
        """Return the state that the command `busway status` shows of each service."""
        fleet = json.loads(await self.command("status", "--json"))
        rows = {row["worker_id"]: row["state"] for row in fleet["workers"]}
        return rows | {row["id"]: row["state"] for row in (*fleet["routers"], *fleet["gateways"])}

    async def readiness(self, gateway: str) -> tuple[int, str]:
        """Return the status of a gateway's GET /ready, and how it says the model is served."""
        async with self.session.get(f"{self.url(gateway)}/ready") as response:
            models = (await response.json())["models"]
            return response.status, models[0]["serves"] if models else "nothing"

    async def until_readiness(self, gateway: str, wanted: tuple[int, str], timeout_s: float) -> None:
        """Wait until a gateway says this."""
        try:
            async with asyncio.timeout(timeout_s):
                while (said := await self.readiness(gateway)) != wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{gateway} says {said}, not {wanted}") from None

    def some_gateway(self, rng: random.Random) -> str:
        """Return a gateway that the fleet knows as ready, or any."""
        ready = sorted(id for id, record in self.fleet.gateways.items() if record.state == "ready")
        return rng.choice(ready or sorted(self.fleet.gateways) or ["g0"])

    async def command(self, *words: str) -> str:
        """Run `busway` with these words against this stack; return what it prints."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "deploy.cli",
            *words,
            env={**os.environ, "BUSWAY_NATS_URL": self._nats.url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    def url(self, gateway: str) -> str:
        """Return a gateway's address, the last one known."""
        if (record := self.fleet.gateways.get(gateway)) is not None:
            self._urls[gateway] = record.url
        return self._urls[gateway]

    # ---- requests ----

    def prompt(self, num_tokens: int = 50) -> tuple[int, ...]:
        """Return a prompt that nobody has seen, so that no cache knows it."""
        number = next(self._numbers)
        return tuple(3 + (number * 7919 + index * 31 + (number >> (index % 8))) % 400 for index in range(num_tokens))

    def ask(
        self, prompt: tuple[int, ...], max_tokens: int = 20, *, via: Via = "bus", gateway: str = "g0", **fields: object
    ) -> Answer:
        """Send a request; its answer fills as it comes."""
        answer = Answer(Ask(prompt=prompt, max_tokens=max_tokens, **fields), via)  # type: ignore[arg-type]
        coro = ask_bus(self.client, answer) if via == "bus" else ask_http(self.session, self.url(gateway), answer)
        answer.task = self._tasks.create_task(coro, name=f"ask {via}")
        self._answers.append(answer)
        return answer

    async def ask_until_held_by(self, router: str) -> list[Answer]:
        """Send pairs of requests until this router has accepted one; NATS chooses among routers."""
        answers: list[Answer] = []
        for _ in range(12):
            answers += self.ask_both()
            await answers[-1].until("accepted")
            if router in answers[-1].holders:
                return answers
        raise AssertionError(f"{router} gets nothing")

    async def _forget_answers(self) -> None:
        """Leave what a failed test has left open."""
        answers, self._answers = self._answers, []
        for answer in answers:
            await answer.leave()

    def ask_both(self, max_tokens: int = 20, num_prompt_tokens: int = 50, **fields: object) -> list[Answer]:
        """Send one request by HTTP and one by the client library."""
        return [self.ask(self.prompt(num_prompt_tokens), max_tokens, via=via, **fields) for via in ("http", "bus")]

    async def cost(self) -> Cost:
        """Return what resubmits and resends there were so far."""
        cost = self.tally.cost
        for gateway in self.fleet.gateways:
            async with self.session.get(f"{self.url(gateway)}/metrics") as response:
                cost += cost_in(await response.text())
        return cost

    # ---- what is left ----

    async def all_free(self, timeout_s: float = FREE_TIMEOUT_S) -> None:
        """Return once no worker holds a request or a block and no process has a task that it didn't have when idle."""
        held: dict[str, object] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while held := await self.held():  # noqa: ASYNC110 (other processes set no event of ours)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None
        assert self.client.num_in_flight == 0

    async def held(self) -> dict[str, object]:
        """Return what isn't free, by member."""
        found: dict[str, object] = {}
        for name, member in self.members.items():
            if not member.is_running:
                continue
            if member.service == "worker" and (load := await self._load(name)):
                found[name] = load
            elif extra := await self._extra_tasks(member):
                found[name] = extra
        return found

    async def load(self, name: str) -> LoadReport:
        """Return a worker's own count."""
        return await self.bus.ask(self.bus.subjects.worker(name, "load"), Ok(), LoadReport, timeout_s=1.0)

    async def until_load(self, name: str, claim: Callable[[LoadReport], bool], timeout_s: float = 15.0) -> None:
        """Wait until a worker's own count is as claimed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not claim(load := await self.load(name)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{name} has {load}") from None

    async def _load(self, name: str) -> str:
        try:
            load = await self.load(name)
        except BusError as error:
            return error.message
        counts = (load.running, load.waiting, load.kv_blocks_used, load.kv_blocks_quarantined)
        return "" if not any(counts) else "running {}, waiting {}, used {}, quarantined {}".format(*counts)

    async def _extra_tasks(self, member: Member) -> Counter[str]:
        """Return the tasks beyond those of the process's first idle moment. Fewer are news, too: then those count."""
        tasks = await member.tasks()
        return tasks - self._quiet.setdefault(member.pid, tasks)

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{member.log()}" for name, member in self.members.items())


@contextlib.asynccontextmanager
async def run_stack(handoff: HandoffMode, *, cluster: Cluster | None = None) -> AsyncIterator[Stack]:
    """Run a stack without members yet; at the end all that run leave by themselves, with exit code 0.

    On a nats-server of its own (`server`), or on a cluster.
    """
    async with contextlib.AsyncExitStack() as context:
        folder = Path(context.enter_context(tempfile.TemporaryDirectory(prefix="busway-faults-")))
        if cluster is None:
            server = await context.enter_async_context(NatsServer())
            nats, own_url = BusConfig(url=server.internal_url), server.internal_url
        else:
            nats, own_url = BusConfig(url=cluster.internal_url, replicas=cluster.replicas), cluster.admin_url
        stack = Stack(nats, handoff, folder)
        if cluster is None:
            stack.server = server
        bus = Bus.connect(own_url, name="faults", client_id="faults", replicas=nats.replicas)
        stack.bus = await context.enter_async_context(bus)
        stack.fleet = await context.enter_async_context(watch(stack.bus))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # an idle connection is a task of the gateway's
        stack.session = await context.enter_async_context(aiohttp.ClientSession(connector=connector))
        stack.client = Client(stack.bus, on_resubmit=stack.tally.resubmitted, on_resend=stack.tally.resent)
        await stack.client.start()
        stack.fleet.on_change(_tell(stack.client))
        stack._tasks = await context.enter_async_context(asyncio.TaskGroup())
        try:
            yield stack
        finally:
            await stack._forget_answers()
            running = [member for member in stack.members.values() if member.is_running]
            await all_ended(running)
            assert [member.exit_codes[-1] for member in running] == [0] * len(running), stack.logs()


def _id(record: Record) -> str:
    return record.worker_id if isinstance(record, RuntimeConfig) else record.id


def _tell(client: Client) -> Callable[[ChangeKind, Record], None]:
    def on_change(kind: ChangeKind, record: Record) -> None:
        if kind == "left":
            client.holder_left(_id(record))

    return on_change
