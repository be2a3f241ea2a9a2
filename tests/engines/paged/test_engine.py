"""The engine as its worker sees it: it says what it is, dies loudly, leaves nothing, and comes from settings."""

import asyncio
import threading
import time

import msgspec
import pytest

from schemas.errors import EngineError, KvMismatchError, RequestError, UnavailableError, WorkerLostError
from schemas.frames import Failed
from schemas.ids import Epoch, WorkerId, new_attempt_id
from schemas.peer import Landed, LeaseRequest, MeetRequest, MetadataRequest, Stranded, WriteRequest
from services.config import WorkerConfig
from services.engines.paged.engine import PagedEngine
from services.engines.paged.handoff import HandoffOptions
from services.engines.paged.runner import Sampled, Slice
from services.engines.protocol import EngineProfile
from services.engines.registry import make_engine
from services.engines.sim.runner import SimRunner
from services.kv.nixl import NixlTransfer
from services.kv.shm import ShmTransfer
from tests.engines.paged.fleet import (
    Fleet,
    LocalLink,
    aggregated,
    decode_leg,
    fleet_of,
    met,
    prefill_leg,
    prompt,
    pulled,
    request_for,
    room_of,
    running,
)


@pytest.mark.parametrize("fetch", ["read", "write"])
async def test_nixl_moves_the_kv_of_both_handoffs(fetch, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    options = HandoffOptions(fetch=fetch)
    fleet = Fleet(LocalLink())
    async with (
        running(fleet, "p", transfer=NixlTransfer(), options=options, max_batched_tokens="32"),
        running(fleet, "d", transfer=NixlTransfer(), options=options),
        running(fleet, "alone"),
    ):
        fleet["p"].engine.peer_joined(fleet["d"].worker, fleet["d"].epoch)
        for salt, handoff in enumerate((pulled, met)):
            request = request_for(prompt(100, salt=salt), max_tokens=20)
            assert await handoff(fleet["p"], fleet["d"], request) == await aggregated(fleet["alone"], request)
        load = fleet["d"].engine.load()
        assert load.kv_transfer_bytes == {"nixl": 2 * 7 * 256}
        assert (load.num_remote_prefills, load.num_recomputed_tokens) == (2, 0)
        await fleet.until_empty()


async def test_the_profile_is_the_runners_and_both_agree_on_it():
    async with fleet_of("p", "d", block_size="8", num_blocks="99") as fleet:
        profile = fleet["p"].profile
        assert (profile.backend, profile.block_size, profile.total_kv_blocks) == ("sim", 8, 99)
        assert profile.handoff == "after_prefill"
        assert profile.kv_layout == fleet["d"].profile.kv_layout
        assert fleet["p"].engine.load().kv_blocks_total == 99


class BurningRunner(SimRunner):
    """A device that fails at the second step."""

    num_steps = 0

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        self.num_steps += 1
        if self.num_steps == 2:
            raise RuntimeError("the device burns")
        return super().execute(slices)


async def run_engine(engine: PagedEngine, emit=lambda events: None, link: LocalLink | None = None):
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
    run = asyncio.get_running_loop().create_task(
        engine.run(
            worker=WorkerId("w"),
            epoch=Epoch(time.time_ns()),
            peers=link or LocalLink(),
            emit=emit,
            ready=ready.set_result,
        )
    )
    await asyncio.wait([run, ready], return_when=asyncio.FIRST_COMPLETED)
    return run


async def test_run_raises_when_the_engines_loop_dies():
    engine = PagedEngine(BurningRunner({}), ShmTransfer())
    run = await run_engine(engine)
    engine.decode(decode_leg(request_for(prompt(5))))
    engine.prefill(prefill_leg(request_for(prompt(5))))
    with pytest.raises(EngineError, match="the device burns"):
        await asyncio.wait_for(run, 5)


class UnloadableRunner(SimRunner):
    def load(self, allocate):
        raise RequestError("no such model")


async def test_run_raises_what_loading_raises():
    run = await run_engine(PagedEngine(UnloadableRunner({}), ShmTransfer()))
    with pytest.raises(RequestError, match="no such model"):
        await asyncio.wait_for(run, 5)


class BurningTransfer(ShmTransfer):
    """A library that ends its thread without a word."""

    def poll(self, handle):
        raise SystemExit


async def test_run_raises_when_the_transfer_thread_dies():
    async with fleet_of("p") as fleet:
        engine = PagedEngine(SimRunner({"num_blocks": "64"}), BurningTransfer())
        run = await run_engine(engine, link=fleet.link)
        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request))
        engine.decode(decode_leg(request, await fleet["p"].ticket(request.attempt_id)))
        with pytest.raises(EngineError, match="transfer thread died"):
            await asyncio.wait_for(run, 5)


async def test_cancelling_run_in_the_middle_of_handoffs_leaves_no_task_and_no_thread():

    before = asyncio.all_tasks()
    threads = {thread.name for thread in threading.enumerate()}
    async with fleet_of("p", "d", options=HandoffOptions(lease_s=60), num_blocks="512") as fleet:
        for number in range(6):
            request = request_for(prompt(40, salt=number), max_tokens=900)
            if number % 2:
                fleet["p"].engine.prefill(prefill_leg(request))
            else:
                fleet["d"].engine.decode(decode_leg(request, room_of(fleet["p"])))
        await fleet["p"].until(lambda: fleet.link.count(MeetRequest) >= 3)
    assert asyncio.all_tasks() == before
    assert {thread.name for thread in threading.enumerate()} - threads <= {"asyncio_0", "asyncio_1"}


async def test_an_engine_that_is_not_ready_says_so():
    engine = PagedEngine(SimRunner({}), ShmTransfer())
    with pytest.raises(UnavailableError):
        engine.decode(decode_leg(request_for(prompt(3))))
    with pytest.raises(UnavailableError):
        await engine.answer(Stranded(attempt_id=new_attempt_id(), error=EngineError("x").record()))


async def test_requests_that_can_never_fit_are_refused_with_the_field():
    async with fleet_of("p", num_blocks="4", max_context_tokens="200") as fleet:
        engine = fleet["p"].engine
        for leg, take in ((prefill_leg, engine.prefill), (decode_leg, engine.decode)):
            for length, max_tokens in ((200, 1), (190, 20), (150, 1)):
                with pytest.raises(RequestError) as caught:
                    take(leg(request_for(prompt(length), max_tokens=max_tokens)))
                assert caught.value.param in ("messages", "max_tokens")
        await fleet.until_empty()


async def test_an_unexpected_fault_of_a_handoff_ends_its_request_not_the_engine(caplog):
    async with fleet_of("p", "d", options=HandoffOptions(lease_s=60)) as fleet:

        async def burn(worker, message):
            raise ZeroDivisionError("a bug")

        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request))
        ticket = await fleet["p"].ticket(request.attempt_id)
        fleet.link.meddle = burn
        fleet["d"].engine.decode(decode_leg(request, ticket))
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Failed)
        assert end.error.code == "engine_failed"
        fleet.link.meddle = None
        fleet["p"].engine.abort(request.attempt_id)
        await fleet.until_empty()
        assert await pulled(fleet["p"], fleet["d"], request_for(prompt(40), max_tokens=3))


# ---- what peers may ask ----


async def test_agents_are_taken_only_if_they_match():
    async with fleet_of("p", "d") as fleet, running(fleet, "other", block_size="8"):
        p, d, other = fleet["p"], fleet["d"], fleet["other"]
        agent = d.engine.agent()
        with pytest.raises(WorkerLostError):
            await p.engine.answer(MetadataRequest(worker=d.worker, epoch=Epoch(5), agent=agent))
        with pytest.raises(KvMismatchError):
            await p.engine.answer(MetadataRequest(worker=other.worker, epoch=other.epoch, agent=other.engine.agent()))
        assert await p.engine.answer(MetadataRequest(worker=d.worker, epoch=d.epoch, agent=agent)) == p.engine.agent()


async def test_questions_about_unknown_attempts_and_other_epochs_get_an_answer():
    async with fleet_of("p", "d") as fleet:
        p, attempt = fleet["p"], new_attempt_id()
        renewal = LeaseRequest(attempt_id=attempt, epoch=p.epoch, lease_s=1)
        assert not (await p.engine.answer(renewal)).is_good
        stale = LeaseRequest(attempt_id=attempt, epoch=Epoch(5), lease_s=1)
        verdict = await p.engine.answer(stale)
        assert verdict.error is not None
        assert verdict.error.code == "worker_lost"
        await p.engine.answer(Stranded(attempt_id=attempt, error=EngineError("x").record()))
        verdict = await p.engine.answer(renewal)
        assert verdict.error is not None
        assert verdict.error.code == "aborted"
        with pytest.raises(Exception, match="given the attempt up"):
            await p.engine.answer(Landed(attempt_id=attempt, room=3, first_token_id=1))


async def test_a_write_order_may_only_name_blocks_of_its_own_attempt():
    async with fleet_of("p", "d", options=HandoffOptions(lease_s=60)) as fleet:
        p, d = fleet["p"], fleet["d"]
        mine, other = request_for(prompt(40)), request_for(prompt(40, salt=1))
        for request in (mine, other):
            p.engine.prefill(prefill_leg(request))
        ticket, theirs = await p.ticket(mine.attempt_id), await p.ticket(other.attempt_id)

        stolen = msgspec.structs.replace(ticket, block_ids=theirs.block_ids)
        order = WriteRequest(
            ticket=stolen,
            decode_worker=d.worker,
            decode_epoch=d.epoch,
            block_ids=(0, 1, 2),
            deadline=time.time() + 5,
        )
        with pytest.raises(KvMismatchError):
            await p.engine.answer(order)
        for request in (mine, other):
            p.engine.abort(request.attempt_id)
        await fleet.until_empty()


# ---- settings ----


@pytest.mark.parametrize("transfer", ["shm", "nixl"])
async def test_an_engine_comes_from_settings(transfer):
    config = WorkerConfig(
        engine="sim",
        transfer=transfer,
        handoff="rendezvous",
        lease_s=3.0,
        engine_args={"num_blocks": "10", "kv_fetch": "write", "kv_transfer_s": "4"},
    )
    engine = make_engine(config)
    assert isinstance(engine, PagedEngine)
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
    run = asyncio.get_running_loop().create_task(
        engine.run(
            worker=WorkerId("w"),
            epoch=Epoch(1),
            peers=LocalLink(),
            emit=lambda events: None,
            ready=ready.set_result,
        )
    )
    profile = await asyncio.wait_for(ready, 10)
    assert (profile.total_kv_blocks, profile.handoff) == (10, "rendezvous")
    assert profile.bootstrap is not None
    run.cancel()
    await asyncio.wait([run])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"engine_args": {"nonsense": "1"}}, "nonsense"),
        ({"engine_args": {"kv_fetch": "teleport"}}, "fetch"),
        ({"engine_args": {"kv_transfer_s": "soon"}}, "transfer_s"),
        ({"engine_args": {"kv_transfer_s": "0"}}, "above 0"),
        ({"engine_args": {"transfer_gb_per_s": "1"}, "transfer": "nixl"}, "transfer_gb_per_s"),
        ({"lease_s": 0.0}, "lease_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, word):
    with pytest.raises(RequestError, match=word):
        make_engine(WorkerConfig(**({"engine": "sim", "transfer": "shm"} | changes)))
