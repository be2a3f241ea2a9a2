"""The router on a real nats-server, between a client and workers that do as they are told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from bus.connection import Bus
from bus.discovery import Fleet, watch
from bus.server import NatsServer
from schemas.errors import (
    CapacityError,
    DeadlineError,
    EngineError,
    NoRespondersError,
    RequestError,
    UnavailableError,
)
from schemas.frames import Accepted, Decoding, Failed, Finished, Frame, Timings, Tokens, decode_frames
from schemas.handoff import BootstrapInfo, Handoff, TrtllmDisaggregatedParams, VllmKvTransferParams
from schemas.hop import Abort, AcceptedHop, PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import AttemptId, RequestId, new_attempt_id
from schemas.message import encode
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.trace_context import well_formed
from services.config import PolicyName, RouterConfig
from services.router.router import PrefillRouter
from services.router.service import run_router
from tests.router.scripted import MODEL, ScriptedWorker, a_record, scripted_worker


@pytest.fixture(scope="module")
def server(nats_server: NatsServer) -> NatsServer:
    return nats_server


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Owner:
    """A bare client: publishes requests, hears frames."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self.bus = bus
        self.fleet = fleet
        self.frames: list[Frame] = []
        self._has_news = asyncio.Event()

    def on_frames(self, subject: str, payload: bytes) -> None:
        self.frames += decode_frames(payload)
        self._has_news.set()

    def request(
        self,
        *,
        attempt: AttemptId | None = None,
        stream: str = "",
        model: str = MODEL,
        deadlines: Deadlines | None = None,
        traceparent: str = TRACEPARENT,
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId("label"),
            attempt_id=attempt or new_attempt_id(),
            model=model,
            token_ids=(1, 2, 3),
            sampling=Sampling(seed=1),
            stop=StopConditions(max_tokens=4),
            stream=StreamAddress(subject=stream or f"{self.bus.inbox}.tok.s"),
            deadlines=deadlines or Deadlines(),
            traceparent=traceparent,
        )

    async def ask(self, request: GenerateRequest) -> AcceptedHop:
        return await self.bus.ask(self.bus.subjects.requests(MODEL), request, AcceptedHop)

    async def abort(self, router: str, attempt: AttemptId) -> None:
        abort = Abort(attempt_id=attempt, reason="gone")
        await self.bus.publish(self.bus.subjects.router(router, "abort"), encode(abort))

    async def terminal(self, attempt: AttemptId, timeout_s: float = 5.0) -> Finished | Failed:
        async with asyncio.timeout(timeout_s):
            while True:
                for frame in self.frames:
                    if frame.attempt_id == attempt and isinstance(frame, Finished | Failed):
                        return frame
                self._has_news.clear()
                await self._has_news.wait()


class Stage:
    """A router, its client and workers: what a test needs."""

    def __init__(self, bus: Bus, owner: Owner, workers: dict[str, ScriptedWorker], router: str) -> None:
        self.bus = bus
        self.owner = owner
        self.router = router
        self._workers = workers

    def __getitem__(self, name: str) -> ScriptedWorker:
        return self._workers[name]


@contextlib.asynccontextmanager
async def stage(
    server: NatsServer,
    *workers: str,
    handoff: Handoff = "after_prefill",
    policy: PolicyName = "least_loaded",
    is_strict: bool = False,
    num_routers: int = 1,
    settings: dict[str, object] | None = None,
) -> AsyncIterator[Stage]:
    """p* are prefill workers, d* decode, b* both; x* decode with other weights."""
    roles = {"p": "prefill", "d": "decode", "b": "both", "x": "decode"}
    namespace = f"t{time.time_ns()}"
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        buses = [
            await stack.enter_async_context(
                Bus.connect(server.internal_url, name=name, client_id=name, namespace=namespace)
            )
            for name in ("owner", "workers", *(f"router{number}" for number in range(num_routers)))
        ]
        owner_bus, worker_bus, *router_buses = buses
        fleet = await stack.enter_async_context(watch(owner_bus))
        owner = Owner(owner_bus, fleet)
        await owner_bus.listen(f"{owner_bus.inbox}.tok.>", owner.on_frames)
        routers: asyncio.Queue[PrefillRouter] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            for number, bus in enumerate(router_buses):
                config = RouterConfig(
                    id=f"r{number}",
                    policy=policy,
                    is_strict=is_strict,
                    ack_timeout_s=0.3,
                    drain_s=1.0,
                    **settings or {},  # type: ignore[arg-type]
                )
                tasks.create_task(run_router(bus, config, stop=stop, ready=routers.put_nowait))
            for _ in router_buses:
                await routers.get()
            started: dict[str, ScriptedWorker] = {}
            async with contextlib.AsyncExitStack() as joined:
                for name in workers:
                    other = {"compat": "c2", "model_digest": "d2"} if name[0] == "x" else {}
                    record = a_record(name, roles[name[0]], handoff=handoff, **other)  # type: ignore[arg-type]
                    started[name] = await joined.enter_async_context(scripted_worker(worker_bus, record))
                await fleet.wait_for(lambda seen: len(seen.workers) == len(workers), 5.0)
                await until_taken(owner)
                try:
                    yield Stage(owner_bus, owner, started, "r0")
                finally:
                    stop.set()


async def until_taken(owner: Owner) -> None:
    """Return once the router listens for the model and knows its workers."""
    late = Deadlines(total=1.0)
    async with asyncio.timeout(5.0):
        while True:
            try:
                await owner.ask(owner.request(deadlines=late))
            except DeadlineError:
                break
            except NoRespondersError:
                await asyncio.sleep(0.02)


async def test_a_request_goes_to_prefill_then_to_decode_with_the_ticket(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = scene.owner.request()
        began = time.monotonic()
        ack = await scene.owner.ask(request)
        assert (ack.by, time.monotonic() - began < 1.0) == (scene.router, True)
        leg = await scene["p1"].prefill_leg()
        assert (leg.request, leg.bootstrap) == (request, None)
        assert scene["d1"].legs == []
        ticket = await scene["p1"].done(leg)
        decode = await scene["d1"].decode_leg()
        assert (decode.params, decode.prefill_worker) == (ticket, scene["p1"].id)
        await scene["d1"].generate(decode)
        assert isinstance(await scene.owner.terminal(request.attempt_id), Finished)
        assert scene.owner.frames[0] == Accepted(request.attempt_id, scene.router)


@pytest.mark.parametrize("traceparent", ["", "00-nonsense-01", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_request_without_a_usable_trace_context_begins_a_trace(server: NatsServer, traceparent: str) -> None:
    async with stage(server, "p1", "d1") as scene:
        await scene.owner.ask(scene.owner.request(traceparent=traceparent))
        leg = await scene["p1"].prefill_leg()
        assert well_formed(leg.request.traceparent)
        await scene["p1"].done(leg)
        decode = await scene["d1"].decode_leg()
        assert decode.request.traceparent == leg.request.traceparent
        await scene["d1"].generate(decode)


async def test_decode_hears_what_routing_took_and_prefill_said(server: NatsServer) -> None:
    """The router's own time is what is left of its interval: a prefill that claims to have taken longer leaves 0."""
    async with stage(server, "p1", "d1") as scene:
        for number, prefill_s in enumerate((1e-9, 1e3), start=1):
            await scene.owner.ask(scene.owner.request())
            leg = await scene["p1"].prefill_leg(number)
            await scene["p1"].done(leg, timings=Timings(prefill_s=prefill_s))
            decode = await scene["d1"].decode_leg(number)
            assert decode.prefill_timings.prefill_s == prefill_s
            assert (decode.prefill_timings.route_s > 0) == (prefill_s < 1)
            await scene["d1"].generate(decode)


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "queue"])
async def test_a_rendezvous_starts_decode_while_prefill_computes(server: NatsServer, policy: PolicyName) -> None:
    async with stage(server, "p1", "d1", handoff="rendezvous", policy=policy) as scene:
        rooms = set()
        for number in (1, 2):
            await scene.owner.ask(scene.owner.request())
            leg = await scene["p1"].prefill_leg(number)
            await scene["d1"].wait_for(lambda me, number=number: len(me.legs) == number)  # type: ignore[misc]
            params = scene["d1"].legs[-1].params  # type: ignore[union-attr]
            assert isinstance(params, BootstrapInfo)
            assert (params.prefill_worker, params.epoch) == (scene["p1"].id, scene["p1"].config.epoch)
            assert leg.bootstrap in (params, None)
            rooms.add(params.room)
        assert len(rooms) == 2


async def test_a_prefill_that_ends_the_request_never_reaches_decode(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = scene.owner.request()
        await scene.owner.ask(request)
        leg = await scene["p1"].prefill_leg()
        await scene["p1"].tell(
            leg, PrefillEnded(attempt_id=request.attempt_id, token_id=9, reason="stop", num_cached_tokens=2)
        )
        finished = await scene.owner.terminal(request.attempt_id)
        assert isinstance(finished, Finished)
        assert (finished.usage.completion_tokens, finished.usage.cached_tokens) == (1, 2)
        assert [frame.token_ids for frame in scene.owner.frames if isinstance(frame, Tokens)] == [(9,)]
        assert scene["d1"].legs == []


async def test_a_refused_prompt_keeps_its_400(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        scene["p1"].reply = RequestError("prompt too long: 9 > 4", param="messages")
        request = scene.owner.request()
        await scene.owner.ask(request)
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.param) == ("invalid_request", "messages")


async def test_a_failed_prefill_keeps_its_own_error(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = scene.owner.request()
        await scene.owner.ask(request)
        error = EngineError("boom", phase="prefill").record()
        leg = await scene["p1"].prefill_leg()
        await scene["p1"].tell(leg, PrefillFailed(attempt_id=request.attempt_id, error=error))
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert failed.error == error


async def test_a_failed_background_prefill_is_told_to_decode_which_ends_the_stream(server: NatsServer) -> None:
    async with stage(server, "p1", "d1", handoff="rendezvous") as scene:
        request = scene.owner.request()
        await scene.owner.ask(request)
        await scene["d1"].decode_leg()
        error = EngineError("boom", phase="prefill").record()
        leg = await scene["p1"].prefill_leg()
        await until_taken(scene.owner)  # a round trip: by now decode's ack has reached the router
        await scene["p1"].tell(leg, PrefillFailed(attempt_id=request.attempt_id, error=error))
        await scene["d1"].wait_for(lambda me: me.aborts)
        assert scene["d1"].aborts[0].error == error
        assert not [frame for frame in scene.owner.frames if isinstance(frame, Failed)]


async def test_the_router_renews_a_tickets_lease_until_decode_has_it(server: NatsServer) -> None:
    async with stage(server, "p1", "d1", "d2") as scene:
        for name in ("d1", "d2"):
            scene[name].reply = "silent"
        request = scene.owner.request()
        await scene.owner.ask(request)
        await scene["p1"].done(await scene["p1"].prefill_leg(), lease_s=0.06)
        await scene["p1"].wait_for(lambda me: len(me.renewals) >= 3)
        assert {one.attempt_id for one in scene["p1"].renewals} == {request.attempt_id}
        await scene.owner.terminal(request.attempt_id)
        num_renewals = len(scene["p1"].renewals)
        await until_taken(scene.owner)
        await scene["p1"].wait_for(lambda me: me.aborts)
        assert len(scene["p1"].renewals) <= num_renewals + 1  # one may have been under way


async def test_a_decode_that_refuses_frees_prefill_at_once(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        scene["d1"].reply = RequestError("too long for decode")
        request = scene.owner.request()
        await scene.owner.ask(request)
        await scene["p1"].done(await scene["p1"].prefill_leg())
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert failed.error.message == "too long for decode"
        await scene["p1"].wait_for(lambda me: me.aborts)


async def test_a_busy_worker_is_passed_over(server: NatsServer) -> None:
    async with stage(server, "p1", "p2", "d1") as scene:
        scene["p1"].reply = "busy"
        for number in (1, 2, 3):
            await scene.owner.ask(scene.owner.request())
            await scene["p2"].prefill_leg(number)


async def test_all_workers_busy_is_a_429_with_retry_after(server: NatsServer) -> None:
    async with stage(server, "p1", "p2", "d1") as scene:
        scene["p1"].reply = scene["p2"].reply = "busy"
        request = scene.owner.request()
        await scene.owner.ask(request)
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.retry_after_s) == (CapacityError.code, 1.0)


async def test_a_silent_worker_costs_the_attempt_and_is_avoided(server: NatsServer) -> None:
    async with stage(server, "p1", "p2", "d1", policy="round_robin") as scene:
        scene["p1"].reply = scene["p2"].reply = "silent"
        request = scene.owner.request()
        await scene.owner.ask(request)
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert failed.error.code == "worker_lost"
        silent, other = (scene["p1"], scene["p2"]) if scene["p1"].legs else (scene["p2"], scene["p1"])
        await silent.wait_for(lambda me: me.aborts)
        other.reply = "accept"
        for number in (1, 2, 3):
            await scene.owner.ask(scene.owner.request())
            await other.prefill_leg(number)
        assert len(silent.legs) == 1


async def test_a_silent_member_of_a_queue_group_is_aborted_wherever_it_is(server: NatsServer) -> None:
    async with stage(server, "p1", "p2", "d1", policy="queue") as scene:
        scene["p1"].reply = scene["p2"].reply = "silent"
        request = scene.owner.request()
        await scene.owner.ask(request)
        assert isinstance(await scene.owner.terminal(request.attempt_id), Failed)
        for name in ("p1", "p2"):
            await scene[name].wait_for(lambda me: me.aborts)


@pytest.mark.parametrize("handoff", ["after_prefill", "rendezvous"])
async def test_an_abort_reaches_both_legs_also_long_after_the_handover(server: NatsServer, handoff: Handoff) -> None:
    async with stage(server, "p1", "d1", handoff=handoff) as scene:
        early, late = scene.owner.request(), scene.owner.request()
        await scene.owner.ask(early)
        leg = await scene["p1"].prefill_leg()
        await scene.owner.abort(scene.router, early.attempt_id)
        await scene["p1"].wait_for(lambda me: me.aborts)
        scene["d1"].legs.clear()
        await scene.owner.ask(late)
        leg = await scene["p1"].prefill_leg(2)
        if handoff == "after_prefill":
            await scene["p1"].done(leg)
        decode = await scene["d1"].decode_leg()
        await scene["d1"].generate(decode)
        await scene.owner.terminal(late.attempt_id)
        await scene.owner.abort(scene.router, late.attempt_id)
        for name in ("p1", "d1"):
            await scene[name].wait_for(lambda me: late.attempt_id in [abort.attempt_id for abort in me.aborts])


async def test_without_prefill_workers_decode_serves_aggregated(server: NatsServer) -> None:
    async with stage(server, "d1") as scene:
        request = scene.owner.request()
        await scene.owner.ask(request)
        leg = await scene["d1"].decode_leg()
        assert leg.params is None


async def test_strict_without_prefill_workers_is_a_503_in_the_ack(server: NatsServer) -> None:
    async with stage(server, "d1", is_strict=True) as scene:
        with pytest.raises(UnavailableError, match="only decode"):
            await scene.owner.ask(scene.owner.request())


async def test_workers_of_other_weights_are_never_paired(server: NatsServer) -> None:
    async with stage(server, "p1", "x1") as scene:
        await scene.owner.ask(scene.owner.request())
        leg = await scene["x1"].decode_leg()
        assert leg.params is None
        assert scene["p1"].legs == []


async def test_a_stream_outside_the_senders_inbox_is_refused(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        for stream in ("busway.v1.hb.x", "_INBOX.busway.someone.tok.s", f"{scene.bus.inbox}.*"):
            with pytest.raises(RequestError, match="inbox"):
                await scene.owner.ask(scene.owner.request(stream=stream))
        assert scene["p1"].legs == []


async def test_a_request_on_another_models_subject_is_refused(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        with pytest.raises(RequestError, match="model"):
            await scene.owner.ask(scene.owner.request(model="other"))


async def test_a_request_delivered_twice_is_routed_once(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = scene.owner.request()
        for _ in range(3):
            assert (await scene.owner.ask(request)).by == scene.router
        await scene["p1"].done(await scene["p1"].prefill_leg())
        await scene["d1"].decode_leg()
        await scene.owner.ask(request)
        assert (len(scene["p1"].legs), len(scene["d1"].legs)) == (1, 1)


async def test_a_deadline_that_passes_while_prefill_computes_ends_the_request(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = scene.owner.request(deadlines=Deadlines(prefill=time.time() + 0.2))
        await scene.owner.ask(request)
        failed = await scene.owner.terminal(request.attempt_id)
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.phase) == (DeadlineError.code, "prefill")
        await scene["p1"].wait_for(lambda me: me.aborts)


async def test_a_prefill_worker_that_leaves_while_computing_fails_its_requests_at_once(server: NatsServer) -> None:
    async with stage(server, "d1", "p0") as scene:
        worker_bus = scene["p0"]._bus
        async with scripted_worker(worker_bus, a_record("p1", "prefill")) as doomed:
            await scene.owner.fleet.wait_for(lambda fleet: doomed.id in fleet.workers, 5.0)
            scene["p0"].reply = "busy"
            request = scene.owner.request()
            async with asyncio.timeout(5.0):
                while not doomed.legs:  # until the router knows it too
                    request = scene.owner.request()
                    await scene.owner.ask(request)
                    await asyncio.sleep(0.05)
            request = next(leg.request for leg in doomed.legs)
        failed = await scene.owner.terminal(request.attempt_id, timeout_s=1.0)
        assert isinstance(failed, Failed)
        assert failed.error.code == "worker_lost"


async def test_several_routers_share_the_requests(server: NatsServer) -> None:
    async with stage(server, "b1", num_routers=2) as scene:
        takers = {(await scene.owner.ask(scene.owner.request())).by for _ in range(30)}
        assert takers == {"r0", "r1"}
        assert len({leg.request.attempt_id for leg in scene["b1"].legs}) == len(scene["b1"].legs)


async def test_an_orphaned_prefill_is_given_back(server: NatsServer) -> None:
    async with stage(server, "p1", "d1") as scene:
        await scene.owner.ask(scene.owner.request())
        leg = await scene["p1"].prefill_leg()
        stranger = new_attempt_id()
        orphan = leg.__class__(
            request=scene.owner.request(attempt=stranger), dispatch=leg.dispatch, result_subject=leg.result_subject
        )
        await scene["p1"].done(orphan)
        await scene["p1"].wait_for(lambda me: stranger in [abort.attempt_id for abort in me.aborts])


@pytest.mark.parametrize("kind", [VllmKvTransferParams, TrtllmDisaggregatedParams])
async def test_an_orphan_of_another_engine_is_given_back_too(
    server: NatsServer, kind: type[VllmKvTransferParams] | type[TrtllmDisaggregatedParams]
) -> None:
    async with stage(server, "p1", "d1") as scene:
        await scene.owner.ask(scene.owner.request())
        leg = await scene["p1"].prefill_leg()
        stranger = new_attempt_id()
        raw = {msgspec.structs.fields(kind)[0].name: msgspec.Raw(b"{}")}
        params = kind(**raw, prefill_worker=scene["p1"].id, epoch=scene["p1"].config.epoch)
        await scene["p1"].tell(leg, PrefillDone(attempt_id=stranger, params=params))
        await scene["p1"].wait_for(lambda me: stranger in [abort.attempt_id for abort in me.aborts])


async def test_decoding_frames_come_from_decode_not_from_the_router(server: NatsServer) -> None:
    async with stage(server, "b1") as scene:
        request = scene.owner.request()
        await scene.owner.ask(request)
        await scene["b1"].generate(await scene["b1"].decode_leg())
        await scene.owner.terminal(request.attempt_id)
        mine = [type(frame) for frame in scene.owner.frames if frame.attempt_id == request.attempt_id]
        assert mine == [Accepted, Decoding, Tokens, Finished]
