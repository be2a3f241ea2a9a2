"""A whole stack in one process: routers and workers with sim engines, each on a connection of its own, and a client.

Workers are named by role: p* prefill, d* decode, b* both.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from bus.client import Client
from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.fleet_state import ChangeKind
from bus.life import DEFAULT_PATIENCE
from bus.patience import Patience
from bus.server import NatsServer
from schemas.errors import NoRespondersError
from schemas.explanation import ExplainRequest, Explanation
from schemas.frames import Accepted, Decoding, Finished, Frame, Prefilling, Tokens
from schemas.hop import AcceptedHop, Drain
from schemas.ids import WorkerId, new_attempt_id, new_request_id
from schemas.message import decode
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import LoadReport, Record, RuntimeConfig
from services.config import HandoffMode, PolicyName, RouterConfig, WorkerConfig
from services.engines.protocol import Engine, EngineLoad
from services.engines.registry import make_engine
from services.router.router import PrefillRouter
from services.router.service import run_router
from services.worker.service import run_worker

MODEL = "sim"
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
FREE_TIMEOUT_S = 5.0


class Outcome:
    """What a client saw of one completion."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    @property
    def ids(self) -> list[int]:
        return [token for frame in self.frames if isinstance(frame, Tokens) for token in frame.token_ids]

    @property
    def logprobs(self) -> list[float]:
        lists = [frame.logprobs or () for frame in self.frames if isinstance(frame, Tokens)]
        return [one.logprob for several in lists for one in several]

    @property
    def finished(self) -> Finished:
        last = self.frames[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def prefilled_by(self) -> str:
        return next((str(frame.worker) for frame in self.frames if isinstance(frame, Prefilling)), "")

    @property
    def decoded_by(self) -> str:
        return next((str(frame.worker) for frame in self.frames if isinstance(frame, Decoding)), "")

    @property
    def routed_by(self) -> str:
        return next((frame.router for frame in self.frames if isinstance(frame, Accepted)), "")


class Member:
    """A worker that runs in this process. `stop` lets it leave; `is_over` when it has."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[RuntimeConfig] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None]

    def load(self) -> EngineLoad:
        return self.engine.load()

    def is_free(self) -> bool:
        load = self.load()
        return load.running + load.waiting + load.num_held + load.kv_blocks_used + load.kv_blocks_quarantined == 0


class Stack:
    """What a flow test needs; made by `stack`."""

    def __init__(self, server: NatsServer, bus: Bus, fleet: Fleet, namespace: str, patience: Patience) -> None:
        self.server = server
        self.bus = bus
        self.fleet = fleet
        self.namespace = namespace
        self.resubmits: list[str] = []
        self.resends: list[str] = []
        self.client = Client(bus, patience=patience, on_resubmit=self.resubmits.append, on_resend=self.resends.append)
        fleet.on_change(self._tell_who_left)
        self.members: dict[str, Member] = {}
        self.buses: list[Bus] = [bus]
        self.router_stops: dict[str, asyncio.Event] = {}
        self.routers: dict[str, PrefillRouter] = {}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def _tell_who_left(self, kind: ChangeKind, record: Record) -> None:
        if kind == "left":
            self.client.holder_left(record.worker_id if isinstance(record, RuntimeConfig) else record.id)

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        on_frame: Callable[[Frame], bool] | None = None,
        stop: StopConditions | None = None,
        deadlines: Deadlines | None = None,
        temperature: float = 0.0,
        num_logprobs: int | None = None,
        priority: int = 0,
        session: str = "",
        cache_salt: str = "",
    ) -> Outcome:
        """Return the completion; `on_frame` returning True closes the stream at that frame, as a client leaves."""
        outcome = Outcome()
        stream = self.client.generate(
            model=MODEL,
            token_ids=tuple(prompt),
            sampling=Sampling(seed=11, temperature=temperature),
            stop=stop or StopConditions(max_tokens=max_tokens),
            request_id=new_request_id(),
            deadlines=deadlines or Deadlines(),
            num_logprobs=num_logprobs,
            priority=priority,
            session=session,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(stream) as batches:
            async for batch in batches:
                for frame in batch:
                    outcome.frames.append(frame)
                    if on_frame is not None and on_frame(frame):
                        return outcome
        return outcome

    async def explain(self, id: str, router: str = "r0") -> Explanation:
        """Return what a router says of an attempt or request."""
        return await self.bus.ask(self.bus.subjects.router(router, "explain"), ExplainRequest(id=id), Explanation)

    async def reported_idle(self, name: str) -> None:
        """Return once that worker has told the routers that it has nothing to do."""
        told = asyncio.Event()

        def hear(subject: str, payload: bytes) -> None:
            report = decode(payload, LoadReport)
            if report.worker_id == name and report.running + report.waiting == 0:
                told.set()

        listening = await self.bus.listen(self.bus.subjects.all_loads, hear)
        async with asyncio.timeout(5.0):
            await told.wait()
        await listening.stop()

    async def all_free(self, timeout_s: float = FREE_TIMEOUT_S) -> None:
        """Return once no worker holds a request or a block; raises with what is left otherwise."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(member.is_free() for member in self.members.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            held = {name: member.load() for name, member in self.members.items() if not member.is_free()}
            raise AssertionError(f"still held: {held}") from None

    async def until(self, claim: Callable[[], object], timeout_s: float = 5.0) -> None:
        """Return once the claim is true."""
        async with asyncio.timeout(timeout_s):
            while not claim():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def drain(self, name: str, *, grace_s: float | None = None) -> AcceptedHop:
        record = await self.members[name].ready
        subject = self.bus.subjects.admin(record.worker_id, "drain")
        return await self.bus.ask(subject, Drain(grace_s=grace_s), AcceptedHop, timeout_s=20.0)


@contextlib.asynccontextmanager
async def stack(
    server: NatsServer,
    *workers: str,
    handoff: HandoffMode = "pull",
    policy: PolicyName = "least_loaded",
    num_routers: int = 1,
    is_strict: bool = False,
    router: dict[str, object] | None = None,
    engine_args: dict[str, str] | None = None,
    lease_s: float = 10.0,
    max_waiting: int = 0,
    namespace: str = "",
    patience: Patience = DEFAULT_PATIENCE,
) -> AsyncIterator[Stack]:
    """Run a stack; on the way out everything leaves by itself, and nothing may be left."""
    namespace = namespace or f"t{secrets.token_hex(6)}"
    async with contextlib.AsyncExitStack() as stack_:
        bus = await stack_.enter_async_context(connect(server, "client", namespace))
        fleet = await stack_.enter_async_context(watch(bus))
        here = Stack(server, bus, fleet, namespace, patience)
        await here.client.start()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_routers):
                start_router(here, tasks, f"r{number}", policy=policy, is_strict=is_strict, settings=router)
            for name in workers:
                start_worker(
                    here,
                    tasks,
                    name,
                    handoff=handoff,
                    engine_args=engine_args,
                    lease_s=lease_s,
                    max_waiting=max_waiting,
                )
            if workers:
                await until_ready(here, num_routers)
            try:
                yield here
            finally:
                for member in here.members.values():
                    member.stop.set()
                for stop in here.router_stops.values():
                    stop.set()


def start_router(
    here: Stack,
    tasks: asyncio.TaskGroup,
    name: str,
    *,
    policy: PolicyName = "least_loaded",
    is_strict: bool = False,
    settings: dict[str, object] | None = None,
) -> None:
    """Start one more router; `settings`: further ones of RouterConfig."""
    here.router_stops[name] = asyncio.Event()
    config = RouterConfig(id=name, policy=policy, is_strict=is_strict, drain_s=2.0, **settings or {})  # type: ignore[arg-type]
    tasks.create_task(_router(here, config))


def start_worker(
    here: Stack,
    tasks: asyncio.TaskGroup,
    name: str,
    *,
    handoff: HandoffMode = "pull",
    engine_args: dict[str, str] | None = None,
    lease_s: float = 10.0,
    max_waiting: int = 0,
    labels: dict[str, str] | None = None,
    engine: Engine | None = None,
    on_death: Callable[[BaseException], None] | None = None,
) -> Member:
    """Start one more worker; `here.fleet` shows when it has joined. With `on_death` its error is that one's alone."""
    config = WorkerConfig(
        id=name,
        role=ROLES[name[0]],  # type: ignore[arg-type]
        engine="sim",
        transfer="shm",
        handoff=handoff,
        lease_s=lease_s,
        max_waiting=max_waiting,
        drain_s=3.0,
        labels=labels or {},
        engine_args=engine_args or {},
    )
    member = here.members[name] = Member(engine or make_engine(config))
    member.task = tasks.create_task(_worker(here, config, member, on_death))
    return member


async def until_ready(here: Stack, num_routers: int = 1) -> None:
    """Return once everybody has joined and a request reaches a router that sees a complete path."""
    names = {WorkerId(name) for name in here.members}
    await here.fleet.wait_for(
        lambda fleet: names <= set(fleet.workers) and len(fleet.routers) >= num_routers, timeout_s=10.0
    )
    async with asyncio.timeout(5.0):
        while not await _is_served(here):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _is_served(here: Stack) -> bool:
    """Whether a router takes requests; a request without a stream in our inbox is refused by one that listens."""
    subject = here.bus.subjects.requests(MODEL)
    try:
        await here.bus.ask(subject, b"{}", AcceptedHop)
    except NoRespondersError:
        return False
    except Exception:
        return True
    return False


def a_request(here: Stack, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> GenerateRequest:
    values: dict[str, object] = {
        "request_id": new_request_id(),
        "attempt_id": new_attempt_id(),
        "model": MODEL,
        "token_ids": tuple(prompt),
        "sampling": Sampling(seed=11, temperature=0.0),
        "stop": StopConditions(max_tokens=max_tokens),
        "stream": StreamAddress(subject=f"{here.bus.inbox}.raw.s"),
    }
    return GenerateRequest(**(values | fields))  # type: ignore[arg-type]


def connect(server: NatsServer, name: str, namespace: str) -> contextlib.AbstractAsyncContextManager[Bus]:
    client_id = f"{name}-{secrets.token_hex(3)}"
    return Bus.connect(server.internal_url, name=name, client_id=client_id, namespace=namespace)


async def _router(here: Stack, config: RouterConfig) -> None:
    async with connect(here.server, config.id, here.namespace) as bus:
        here.buses.append(bus)
        stop = here.router_stops[config.id]
        await run_router(bus, config, stop=stop, ready=lambda router: here.routers.update({config.id: router}))


async def _worker(
    here: Stack, config: WorkerConfig, member: Member, on_death: Callable[[BaseException], None] | None
) -> None:
    try:
        async with connect(here.server, config.id, here.namespace) as bus:
            here.buses.append(bus)
            await run_worker(bus, config, member.engine, stop=member.stop, ready=member.ready.set_result)
    except Exception as error:
        if on_death is None:
            raise
        on_death(error)
