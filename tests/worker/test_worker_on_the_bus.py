"""One worker with the sim engine on a real nats-server; the test is its router, its client and its peers."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from bus.cards import fetch_card
from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.server import NatsServer
from schemas.errors import AbortedError, AckTimeoutError, DeadlineError, KvMismatchError, RequestError
from schemas.frames import Begun, Decoding, Failed, Finished, Frame, Prefilling, Tokens, decode_frames
from schemas.handoff import BootstrapInfo, KvTicket
from schemas.hop import (
    Abort,
    AcceptedHop,
    Busy,
    DecodeRequest,
    Dispatch,
    Drain,
    Ok,
    PrefillDone,
    PrefillEnded,
    PrefillFailed,
    PrefillRequest,
)
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId, new_attempt_id
from schemas.message import decode, encode
from schemas.peer import AgentMetadata, ConfirmRequest, MetadataRequest, Verdict
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import LoadReport, RuntimeConfig
from services.config import HandoffMode, RoleName, WorkerConfig
from services.engines.protocol import Engine
from services.engines.registry import make_engine
from services.worker.peers import BusPeerLink
from services.worker.service import run_worker

SLOW = {"prefill_ms_per_token": "1", "decode_ms_per_step": "5", "max_batched_tokens": "32"}


@pytest.fixture(scope="module")
def server(nats_server: NatsServer) -> NatsServer:
    return nats_server


class Bench:
    """A worker on the bench: what it says lands in `frames`, `results` and `reports`."""

    def __init__(self, bus: Bus, fleet: Fleet, engine: Engine, me: RuntimeConfig, stop: asyncio.Event) -> None:
        self.bus = bus
        self.fleet = fleet
        self.engine = engine
        self.me = me
        self.stop = stop
        self.frames: list[Frame] = []
        self.results: list[PrefillDone | PrefillEnded | PrefillFailed] = []
        self.reports: list[LoadReport] = []
        self._number = 0

    async def listen(self) -> None:
        def on_result(subject: str, payload: bytes) -> None:
            self.results.append(decode(payload, PrefillDone | PrefillEnded | PrefillFailed))  # type: ignore[arg-type]

        inbox = self.bus.inbox
        await self.bus.listen(f"{inbox}.tok.s", lambda subject, payload: self.frames.extend(decode_frames(payload)))
        await self.bus.listen(f"{inbox}.results", on_result)
        await self.bus.listen(
            self.bus.subjects.all_loads, lambda subject, payload: self.reports.append(decode(payload, LoadReport))
        )

    def request(
        self, num_tokens: int = 20, max_tokens: int = 6, *, deadlines: Deadlines | None = None
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId("label"),
            attempt_id=new_attempt_id(),
            model=self.me.model,
            token_ids=tuple(range(3, 3 + num_tokens)),
            sampling=Sampling(seed=1, temperature=0.0),
            stop=StopConditions(max_tokens=max_tokens),
            stream=StreamAddress(subject=f"{self.bus.inbox}.tok.s"),
            deadlines=deadlines or Deadlines(),
        )

    def dispatch(self) -> Dispatch:
        self._number += 1
        return Dispatch(router="r", epoch=Epoch(5), number=self._number)

    def decode_leg(self, request: GenerateRequest | None = None) -> DecodeRequest:
        return DecodeRequest(request=request or self.request(), dispatch=self.dispatch())

    def prefill_leg(
        self, request: GenerateRequest | None = None, bootstrap: BootstrapInfo | None = None
    ) -> PrefillRequest:
        return PrefillRequest(
            request=request or self.request(),
            dispatch=self.dispatch(),
            result_subject=f"{self.bus.inbox}.results",
            bootstrap=bootstrap,
        )

    async def send(self, leg: PrefillRequest | DecodeRequest) -> AcceptedHop | Busy:
        verb = "prefill" if isinstance(leg, PrefillRequest) else "decode"
        answer: AcceptedHop | Busy = await self.bus.ask(
            self.bus.subjects.worker(self.me.worker_id, verb),  # type: ignore[arg-type]
            leg,
            AcceptedHop | Busy,
        )
        return answer

    async def abort(self, attempt: AttemptId, **fields: object) -> None:
        abort = Abort(attempt_id=attempt, reason="test", **fields)  # type: ignore[arg-type]
        await self.bus.ask(self.bus.subjects.worker(self.me.worker_id, "abort"), abort, Ok)

    async def until(self, claim: Callable[[], object], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not claim():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def end_of(self, attempt: AttemptId) -> Finished | Failed:
        def ends() -> list[Finished | Failed]:
            return [one for one in self.frames if isinstance(one, Finished | Failed) and one.attempt_id == attempt]

        await self.until(ends)
        return ends()[0]

    async def all_free(self) -> None:
        def held() -> int:
            load = self.engine.load()
            return load.running + load.waiting + load.num_held + load.kv_blocks_used

        await self.until(lambda: held() == 0)


@contextlib.asynccontextmanager
async def bench(
    server: NatsServer,
    role: RoleName,
    *,
    handoff: HandoffMode = "pull",
    engine_args: dict[str, str] | None = None,
    max_waiting: int = 0,
) -> AsyncIterator[Bench]:
    config = WorkerConfig(
        role=role,
        engine="sim",
        transfer="shm",
        handoff=handoff,
        max_waiting=max_waiting,
        drain_s=3.0,
        engine_args=engine_args or {},
    )
    namespace = f"t{secrets.token_hex(6)}"
    stop, ready = asyncio.Event(), asyncio.Queue[RuntimeConfig]()
    engine = make_engine(config)

    def connect(name: str) -> contextlib.AbstractAsyncContextManager[Bus]:
        return Bus.connect(server.internal_url, name=name, client_id=name, namespace=namespace)

    async def work() -> None:
        async with connect("worker") as bus:
            await run_worker(bus, config, engine, stop=stop, ready=ready.put_nowait)

    async with connect("test") as bus, watch(bus) as fleet, asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        here = Bench(bus, fleet, engine, await ready.get(), stop)
        await here.listen()
        await fleet.wait_for(lambda seen: here.me.worker_id in seen.workers, 5.0)
        try:
            yield here
        finally:
            stop.set()


async def test_it_joins_with_a_card_and_a_record_that_says_what_it_is(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        record = here.fleet.workers[here.me.worker_id]
        assert record == here.me
        assert (record.role, record.state, record.max_waiting) == ("both", "ready", 4 * record.max_num_seqs + 64)
        card = await fetch_card(here.bus, record.model_digest)
        assert card.digest == record.model_digest


async def test_a_leg_is_acked_then_streamed_one_message_a_step(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        leg = here.decode_leg()
        ack = await here.send(leg)
        assert ack == AcceptedHop(by=here.me.worker_id, epoch=here.me.epoch)
        await here.end_of(leg.request.attempt_id)
        assert [type(frame) for frame in here.frames if not isinstance(frame, Tokens)] == [Decoding, Begun, Finished]
        seqs = [frame.seq for frame in here.frames if isinstance(frame, Tokens)]
        assert seqs == list(range(6))


async def test_a_leg_delivered_twice_runs_once(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        leg = here.decode_leg()
        for _ in range(2):
            assert isinstance(await here.send(leg), AcceptedHop)
        await here.end_of(leg.request.attempt_id)
        assert isinstance(await here.send(leg), AcceptedHop)
        await here.all_free()
        assert [type(frame) for frame in here.frames].count(Finished) == 1
        assert here.engine.load().num_generated_tokens == 6


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_for_a_later_process_of_its_id_is_let_pass(server: NatsServer, role: RoleName) -> None:
    """A worker that was replaced, and wakes up, still hears what its successor is asked."""
    async with bench(server, role) as here:
        leg = here.prefill_leg() if role == "prefill" else here.decode_leg()
        with pytest.raises(AckTimeoutError):
            await here.send(msgspec.structs.replace(leg, worker_epoch=Epoch(here.me.epoch + 1)))
        assert here.frames == []
        for epoch in (None, here.me.epoch, Epoch(here.me.epoch - 1)):
            leg = here.prefill_leg() if role == "prefill" else here.decode_leg()
            assert isinstance(await here.send(msgspec.structs.replace(leg, worker_epoch=epoch)), AcceptedHop)
            await here.abort(leg.request.attempt_id)


async def test_an_abort_that_comes_before_its_leg_wins(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        leg = here.decode_leg()
        await here.abort(leg.request.attempt_id)
        with pytest.raises(AbortedError):
            await here.send(leg)
        assert here.engine.load().waiting == 0
        assert here.frames == []


async def test_an_abort_frees_and_silences_and_one_with_an_error_fails(server: NatsServer) -> None:
    async with bench(server, "both", engine_args=SLOW) as here:
        quiet, loud = here.decode_leg(here.request(10, 5000)), here.decode_leg(here.request(10, 5000))
        for leg in (quiet, loud):
            await here.send(leg)
        await here.until(lambda: sum(isinstance(frame, Tokens) for frame in here.frames) > 4)
        await here.abort(quiet.request.attempt_id)
        error = RequestError("its prefill failed").record()
        await here.abort(loud.request.attempt_id, error=error)
        failed = await here.end_of(loud.request.attempt_id)
        assert isinstance(failed, Failed)
        assert failed.error == error
        await here.all_free()
        assert not [
            one for one in here.frames if isinstance(one, Failed) and one.attempt_id == quiet.request.attempt_id
        ]


async def test_what_is_past_its_deadline_is_dropped(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        leg = here.decode_leg(here.request(deadlines=Deadlines(total=time.time() - 1)))
        with pytest.raises(DeadlineError):
            await here.send(leg)
        assert here.engine.load().num_prompt_tokens == 0


async def test_a_prompt_that_cant_fit_is_refused_in_the_ack(server: NatsServer) -> None:
    async with bench(server, "both", engine_args={"max_context_tokens": "64"}) as here:
        with pytest.raises(RequestError, match="64"):
            await here.send(here.decode_leg(here.request(100)))
        with pytest.raises(RequestError, match="64"):
            await here.send(here.decode_leg(here.request(100)))


async def test_more_than_it_may_hold_is_busy(server: NatsServer) -> None:
    args = SLOW | {"max_num_seqs": "2"}
    async with bench(server, "both", engine_args=args, max_waiting=3) as here:
        answers = [await here.send(here.decode_leg(here.request(200, 100))) for _ in range(7)]
        assert [type(answer) for answer in answers] == [AcceptedHop] * 5 + [Busy] * 2
        for leg_frames in list(here.frames):
            await here.abort(leg_frames.attempt_id)
        await here.all_free()
        assert isinstance(await here.send(here.decode_leg()), AcceptedHop)


async def test_a_draining_worker_is_busy_and_answers_once_its_work_has_ended(server: NatsServer) -> None:
    async with bench(server, "both", engine_args=SLOW) as here, asyncio.TaskGroup() as tasks:
        leg = here.decode_leg(here.request(10, 40))
        await here.send(leg)
        subject = here.bus.subjects.admin(here.me.worker_id, "drain")
        drained = tasks.create_task(here.bus.ask(subject, Drain(), AcceptedHop, timeout_s=10.0))
        await here.fleet.wait_for(lambda fleet: fleet.workers[here.me.worker_id].state == "draining", 5.0)
        late = await here.send(here.decode_leg())
        assert isinstance(late, Busy)
        assert late.reason == "draining"
        assert not drained.done()
        assert isinstance(await here.end_of(leg.request.attempt_id), Finished)
        assert (await drained).by == here.me.worker_id
        await here.fleet.wait_for(lambda fleet: not fleet.workers, 1.0)


async def test_a_report_counts_a_dispatch_and_its_load_together(server: NatsServer) -> None:
    async with bench(server, "prefill", engine_args=SLOW) as here:
        legs = [here.prefill_leg(here.request(500)) for _ in range(3)]
        for number, leg in enumerate(legs, 1):
            await here.send(leg)
            await here.until(lambda number=number: here.reports and here.reports[-1].dispatched.get("5") == number)  # type: ignore[misc]
            report = here.reports[-1]
            assert report.running + report.waiting == number
            assert report.queued_prefill_tokens > (number - 1) * 500
        queried = await here.bus.ask(here.bus.subjects.worker(here.me.worker_id, "load"), Ok(), LoadReport)
        assert queried.dispatched == {"5": 3}
        for leg in legs:
            await here.abort(leg.request.attempt_id)


async def test_a_prefill_leg_ends_in_a_ticket_that_an_abort_frees(server: NatsServer) -> None:
    async with bench(server, "prefill") as here:
        leg = here.prefill_leg()
        assert isinstance(await here.send(leg), AcceptedHop)
        await here.until(lambda: here.results)
        (result,) = here.results
        assert isinstance(result, PrefillDone)
        assert isinstance(result.params, KvTicket)
        assert (result.params.prefill_worker, result.params.num_tokens) == (here.me.worker_id, 20)
        assert [type(frame) for frame in here.frames] == [Prefilling]
        assert here.engine.load().num_held == 1
        await here.abort(leg.request.attempt_id)
        await here.all_free()


async def test_a_draining_prefill_worker_waits_until_its_kv_is_fetched(server: NatsServer) -> None:
    async with bench(server, "prefill") as here:
        leg = here.prefill_leg()
        await here.send(leg)
        await here.until(lambda: here.results)
        here.stop.set()
        await here.fleet.wait_for(lambda fleet: fleet.workers[here.me.worker_id].state == "draining", 5.0)
        await asyncio.sleep(0.09)
        assert here.me.worker_id in here.fleet.workers
        confirm = ConfirmRequest(attempt_id=leg.request.attempt_id, epoch=here.me.epoch)
        subject = here.bus.subjects.peer(here.me.worker_id, "confirm")
        assert (await here.bus.ask(subject, confirm, Verdict)).is_good
        await here.fleet.wait_for(lambda fleet: not fleet.workers, 1.0)


async def test_a_member_of_a_queue_group_makes_the_rendezvous_and_tells_it_in_its_ack(server: NatsServer) -> None:
    async with bench(server, "prefill", handoff="rendezvous") as here:
        group = here.bus.subjects.prefill(here.me.model, here.me.compat)
        rooms = set()
        for _ in range(2):
            leg = here.prefill_leg()
            ack = await here.bus.ask(group, leg, AcceptedHop)
            assert ack.bootstrap is not None
            assert (ack.bootstrap.prefill_worker, ack.bootstrap.epoch) == (here.me.worker_id, here.me.epoch)
            rooms.add(ack.bootstrap.room)
            await here.abort(leg.request.attempt_id)
        assert len(rooms) == 2
        leg = here.prefill_leg()
        acks = [await here.bus.ask(group, leg, AcceptedHop) for _ in range(2)]  # delivered twice: one rendezvous
        assert acks[0].bootstrap is not None
        assert acks[0] == acks[1]
        await here.abort(leg.request.attempt_id)
        chosen = BootstrapInfo(prefill_worker=here.me.worker_id, epoch=here.me.epoch, room=9)
        leg = here.prefill_leg(bootstrap=chosen)
        answer = await here.send(leg)
        assert isinstance(answer, AcceptedHop)
        assert answer.bootstrap is None
        await here.abort(leg.request.attempt_id)
        await here.all_free()


async def test_a_deadline_in_the_engine_ends_a_prefill_leg_with_its_phase(server: NatsServer) -> None:
    async with bench(server, "prefill", engine_args=SLOW) as here:
        leg = here.prefill_leg(here.request(1000, deadlines=Deadlines(prefill=time.time() + 0.15)))
        await here.send(leg)
        await here.until(lambda: here.results)
        (result,) = here.results
        assert isinstance(result, PrefillFailed)
        assert (result.error.code, result.error.phase) == ("deadline_exceeded", "prefill")
        await here.all_free()


async def test_peers_reach_the_engine_and_its_refusals_reach_them(server: NatsServer) -> None:
    async with bench(server, "prefill") as here:
        link = BusPeerLink(here.bus)
        mine = AgentMetadata(
            name="x@1", epoch=Epoch(1), transport="shm", layout="other", host_id="h", num_blocks=1, blob=b""
        )
        request = MetadataRequest(worker=WorkerId("x"), epoch=Epoch(1), agent=mine)
        with pytest.raises(KvMismatchError, match="other"):
            await link.ask(here.me.worker_id, request, AgentMetadata)
        confirm = ConfirmRequest(attempt_id=new_attempt_id(), epoch=here.me.epoch)
        assert not (await link.ask(here.me.worker_id, confirm, Verdict)).is_good


async def test_an_engine_that_cant_load_raises_out_of_the_worker(server: NatsServer) -> None:
    config = WorkerConfig(role="both", engine="sim", transfer="shm")
    broken = make_engine(msgspec.structs.replace(config, engine_args={"num_blocks": "999999999999"}))
    async with Bus.connect(server.internal_url, name="w", client_id="w") as bus:
        with pytest.raises((OSError, MemoryError, OverflowError, ValueError)):
            await run_worker(bus, config, broken, stop=asyncio.Event(), ready=lambda record: None)


async def test_a_worker_told_to_stop_while_it_loads_never_joins(server: NatsServer) -> None:
    config = WorkerConfig(role="both", engine="sim", transfer="shm", engine_args={"load_ms": "300"})
    joined: list[RuntimeConfig] = []
    stop = asyncio.Event()
    stop.set()
    async with Bus.connect(server.internal_url, name="w", client_id="w") as bus:
        await run_worker(bus, config, make_engine(config), stop=stop, ready=joined.append)
    assert joined == []


async def test_an_unknown_message_is_answered_not_swallowed(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        subject = here.bus.subjects.worker(here.me.worker_id, "decode")
        with pytest.raises(RequestError, match="malformed"):
            await here.bus.ask(subject, encode(Ok()), AcceptedHop)
