"""Workers and routers that come, leave and die while requests are under way."""

import asyncio
import contextlib

import pytest

from bus.discovery import register
from bus.patience import Patience
from bus.server import NatsServer
from schemas.errors import BuswayError, EngineError, WorkerLostError
from schemas.frames import Tokens
from schemas.hop import AcceptedHop
from schemas.ids import Epoch
from schemas.request import StreamAddress
from schemas.worker import ServiceRecord
from services.config import HandoffMode
from services.engines.paged.engine import PagedEngine
from services.engines.paged.runner import Sampled, Slice
from services.engines.sim.runner import SimRunner
from services.kv.shm import ShmTransfer
from tests.flow.stack import Stack, a_request, connect, stack, start_worker, until_ready

HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]
STEADY = {"prefill_ms_per_token": "0.2", "decode_ms_per_step": "3"}
POISON = 299
IMPATIENT = Patience(recovery_s=0.3)


@contextlib.asynccontextmanager
async def traffic(here: Stack, num_clients: int = 6):  # type: ignore[no-untyped-def]
    """Clients that never pause while the block runs; every one of their requests must end well."""
    is_over = asyncio.Event()
    finished: list[str] = []

    async def one(number: int) -> None:
        while not is_over.is_set():
            outcome = await here.generate([number + 3] * 30, 15)
            assert len(outcome.ids) == 15
            finished.append(outcome.decoded_by)

    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            clients.create_task(one(number))
        try:
            yield finished
        finally:
            is_over.set()


@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_worker_drained_under_load_loses_nothing(server: NatsServer, handoff: HandoffMode, name: str) -> None:
    async with stack(server, "p1", "p2", "d1", "d2", handoff=handoff, engine_args=STEADY) as here:
        async with traffic(here) as finished:
            await here.until(lambda: len(finished) >= 6)
            ack = await here.drain(name)
            assert ack.by == name
            await here.until(here[name].task.done)
            assert here[name].task.exception() is None
            seen = len(finished)
            await here.until(lambda: len(finished) >= seen + 6)
        del here.members[name]
        await here.all_free()


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_workers_that_join_at_run_time_get_their_share(server: NatsServer, handoff: HandoffMode) -> None:
    async with stack(server, "d1", handoff=handoff, engine_args=STEADY) as here, asyncio.TaskGroup() as joining:
        assert (await here.generate([5, 6, 7], 3)).prefilled_by == ""
        for name in ("p1", "d2"):
            start_worker(here, joining, name, handoff=handoff, engine_args=STEADY)
        await until_ready(here)
        decoded = set()
        for number in range(40):
            outcome = await here.generate([number + 3] * 20, 3)
            decoded.add(outcome.decoded_by)
            if outcome.prefilled_by == "p1" and decoded == {"d1", "d2"}:
                break
        assert decoded == {"d1", "d2"}
        assert outcome.prefilled_by == "p1"
        await here.all_free()
        here["p1"].stop.set()
        here["d2"].stop.set()


async def test_a_router_that_leaves_hands_over_what_it_holds(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", num_routers=2, engine_args=STEADY) as here, traffic(here) as finished:
        await here.until(lambda: len(finished) >= 3)
        here.router_stops["r0"].set()
        await here.fleet.wait_for(lambda fleet: "r0" not in fleet.routers, 5.0)
        seen = len(finished)
        await here.until(lambda: len(finished) >= seen + 6)


class PoisonedRunner(SimRunner):
    """Dies on one token id."""

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        if any(POISON in one.token_ids for one in slices):
            raise RuntimeError("poisoned")
        return super().execute(slices)


@pytest.mark.parametrize("role", ["b9", "p9"])
async def test_an_engine_that_dies_ends_its_requests_and_its_process(server: NatsServer, role: str) -> None:
    workers = () if role == "b9" else ("d1",)
    async with stack(server, *workers, patience=IMPATIENT) as here:
        died: list[BaseException] = []
        engine = PagedEngine(PoisonedRunner({"decode_ms_per_step": "5"}), ShmTransfer())
        async with asyncio.TaskGroup() as tasks:
            member = start_worker(here, tasks, role, engine=engine, on_death=died.append)
            await until_ready(here)
            victim = tasks.create_task(_error_of(here, [5] * 30, 5000 if role == "b9" else 1))
            if role == "b9":
                await here.until(lambda: member.load().running == 1)
            poisoned = await _error_of(here, [POISON] * 30, 3)
            if role == "b9":
                # Sent once more, to nobody, or to a worker that is just going.
                assert {poisoned.code, (await victim).code} <= {EngineError.code, WorkerLostError.code}
            else:
                assert poisoned.message == "it ended well"  # on d1, which can take the poison
                assert EngineError.code in here.resubmits
        await here.fleet.wait_for(lambda fleet: role not in fleet.workers, 1.0)
        assert isinstance(died[0], EngineError)
        del here.members[role]
        await here.all_free()


async def _error_of(here: Stack, prompt: list[int], max_tokens: int) -> BuswayError:
    try:
        await here.generate(prompt, max_tokens)
    except BuswayError as error:
        return error
    return BuswayError("it ended well")


@pytest.mark.parametrize("workers", [("p1", "d1"), ("b1",)])
async def test_requests_whose_owner_is_gone_are_aborted(server: NatsServer, workers: tuple[str, ...]) -> None:
    async with stack(server, *workers, engine_args={"decode_ms_per_step": "5"}) as here:
        record = ServiceRecord(service="gateway", id="g1", epoch=Epoch(1), state="ready")
        got: list[bytes] = []
        await here.bus.listen(f"{here.bus.inbox}.raw.s", lambda subject, payload: got.append(payload))
        async with connect(here.server, "g1", here.namespace) as bus, register(bus, record, lambda: (0, False)):
            await here.fleet.wait_for(lambda fleet: "g1" in fleet.gateways, 5.0)
            stream = StreamAddress(subject=f"{here.bus.inbox}.raw.s", owner="g1")
            request = a_request(here, [5, 6, 7], 5000, stream=stream)
            await here.bus.ask(here.bus.subjects.requests("sim"), request, AcceptedHop)
            await here.until(lambda: any(b'["t"' in payload for payload in got))
        await here.all_free()


async def test_a_worker_stopped_while_streaming_gives_its_streams_the_grace_to_end(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", engine_args={"decode_ms_per_step": "5"}) as here:
        async with asyncio.TaskGroup() as clients:
            streaming = asyncio.Event()

            def seen(frame: object) -> bool:
                if isinstance(frame, Tokens):
                    streaming.set()
                return False

            client = clients.create_task(here.generate([5, 6, 7], 100, on_frame=seen))
            await streaming.wait()
            here["d1"].stop.set()
        assert len(client.result().ids) == 100
        await here.until(here["d1"].task.done)


async def test_a_grace_that_runs_out_ends_the_rest_as_lost(server: NatsServer) -> None:
    async with stack(server, "b1", engine_args={"decode_ms_per_step": "5"}, patience=IMPATIENT) as here:
        async with asyncio.TaskGroup() as clients:
            client = clients.create_task(_error_of(here, [5, 6, 7], 20_000))
            await here.until(lambda: here["b1"].load().running == 1)
            await here.drain("b1", grace_s=0.1)
        assert client.result().code == "worker_lost"


async def test_a_nats_server_that_restarts_finds_everybody_again() -> None:
    async with NatsServer() as own, stack(own, "p1", "d1") as here:
        assert (await here.generate([5, 6, 7], 3)).prefilled_by == "p1"
        await own.stop()
        await own.start()
        async with asyncio.timeout(15.0):
            while await _prefilled_by(here) != "p1":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await here.all_free()


async def _prefilled_by(here: Stack) -> str:
    try:
        return (await here.generate([5, 6, 7], 3)).prefilled_by
    except BuswayError as error:
        if not error.retryable:
            raise
        return error.code
