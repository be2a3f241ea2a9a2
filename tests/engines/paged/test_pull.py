"""Pull: the disaggregated answer is the aggregated one, it comes from the KV, and nothing stays behind."""

import asyncio
import logging
import time

import msgspec
import pytest

from schemas.errors import RequestError
from schemas.frames import Begun, Failed, Finished, Tokens
from schemas.handoff import KvTicket
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import Epoch, new_attempt_id
from schemas.peer import ConfirmRequest, LeaseRequest, MetadataRequest, Stranded, WriteRequest
from schemas.request import Deadlines, StopConditions
from services.engines.paged.handoff import HandoffOptions
from services.engines.protocol import EngineEvent
from services.kv.shm import ShmTransfer
from services.telemetry import LogConfig, setup_logging
from tests.engines.paged.fleet import (
    Fleet,
    Host,
    LocalLink,
    Pauses,
    aggregated,
    decode_leg,
    fleet_of,
    met,
    prefill_leg,
    prompt,
    pulled,
    request_for,
    running,
)

FETCHES = ["read", "write"]


@pytest.mark.parametrize("handoff", [pulled, met])
@pytest.mark.parametrize("block_size", [1, 16, 256])
async def test_output_equals_the_aggregated_output_at_block_borders(handoff, block_size):
    b = block_size
    async with fleet_of("alone", "p", "d", block_size=str(b), num_blocks=str(max(64, 2048 // b))) as fleet:
        for length in sorted({1, max(1, b - 1), b, b + 1, 2 * b}):
            for _ in range(3):
                request = request_for(prompt(length), max_tokens=5)
                want = await aggregated(fleet["alone"], request)
                assert await handoff(fleet["p"], fleet["d"], request) == want
        assert fleet["d"].engine.load().num_remote_prefills > 0
        assert fleet["d"].engine.load().num_recomputed_tokens == 0
        await fleet.until_empty()


@pytest.mark.parametrize("fetch", FETCHES)
async def test_many_requests_at_once_say_what_one_engine_says(fetch):
    options = HandoffOptions(fetch=fetch)
    async with fleet_of("alone", "p", "d", options=options, num_blocks="512", max_batched_tokens="64") as fleet:
        requests = [request_for(prompt(1 + 13 * n % 170, salt=n), max_tokens=2 + n % 9) for n in range(24)]
        async with asyncio.TaskGroup() as tasks:
            wanted = [tasks.create_task(aggregated(fleet["alone"], request)) for request in requests]
            got = [tasks.create_task(pulled(fleet["p"], fleet["d"], request)) for request in requests]
        assert [task.result() for task in got] == [task.result() for task in wanted]
        load = fleet["d"].engine.load()
        assert load.num_remote_prefills == 24
        assert load.kv_transfer_bytes == {"shm": 256 * sum(-(-len(r.token_ids) // 16) for r in requests)}
        assert fleet["p"].engine.load().kv_transfer_bytes == {}
        assert (fleet.link.count(WriteRequest) > 0) == (fetch == "write")
        await fleet.until_empty()


@pytest.mark.parametrize("fetch", FETCHES)
async def test_decode_given_wrong_ids_and_the_real_kv_gives_the_real_output(fetch):
    async with fleet_of("alone", "p", "d", options=HandoffOptions(fetch=fetch)) as fleet:
        request = request_for(prompt(45), max_tokens=40)
        wrong = msgspec.structs.replace(request, token_ids=prompt(45, salt=9))
        fleet["p"].engine.prefill(prefill_leg(request))
        fleet["d"].engine.decode(decode_leg(wrong, await fleet["p"].ticket(request.attempt_id)))
        # The sim model's later tokens hash the ids read from the KV; its first one is prefill's.
        assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Finished)
        assert end.usage.num_computed_prompt_tokens == 0
        assert end.timings.kv_bytes == 3 * 256
        assert fleet["d"].engine.load().num_recomputed_tokens == 0


async def test_a_prefix_that_decode_has_is_not_moved_again():
    async with fleet_of("alone", "p", "d") as fleet:
        first = request_for(prompt(32))
        longer = request_for((*prompt(32), *prompt(20, salt=3)))
        for request in (first, longer):
            want = await aggregated(fleet["alone"], request)
            assert await pulled(fleet["p"], fleet["d"], request) == want
        assert fleet["d"].engine.load().kv_transfer_bytes == {"shm": (2 + 2) * 256}


async def test_the_first_token_may_end_the_request_at_prefill():
    async with fleet_of("alone", "p", "d") as fleet:
        request = request_for(prompt(20), max_tokens=1, num_logprobs=2)
        want = await aggregated(fleet["alone"], request)
        fleet["p"].engine.prefill(prefill_leg(request))
        result = await fleet["p"].result(request.attempt_id)
        assert isinstance(result, PrefillEnded)
        assert ([result.token_id], result.reason) == (want, "length")
        assert result.logprobs is not None
        assert len(result.logprobs.top) == 2
        await fleet.until_empty()
        stop = StopConditions(max_tokens=9, stop_token_ids=(want[0],))
        request = msgspec.structs.replace(request, attempt_id=new_attempt_id(), stop=stop)
        fleet["p"].engine.prefill(prefill_leg(request))
        result = await fleet["p"].result(request.attempt_id)
        assert isinstance(result, PrefillEnded)
        assert result.reason == "stop"
        await fleet.until_empty()


async def test_logprobs_and_cached_tokens_of_prefill_reach_the_user():
    async with fleet_of("p", "d") as fleet:
        for cached in (0, 32):
            request = request_for(prompt(40), max_tokens=4, num_logprobs=1)
            await pulled(fleet["p"], fleet["d"], request)
            events = fleet["d"].events[request.attempt_id]
            end = events[-1]
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == cached
            logprobs = [event.logprobs for event in events if isinstance(event, Tokens)]
            assert len(logprobs) == 4
            assert all(logprobs)


async def test_resumed_tokens_are_part_of_the_moved_prompt():
    async with fleet_of("alone", "p", "d") as fleet:
        whole = request_for(prompt(30), max_tokens=20)
        want = await aggregated(fleet["alone"], whole)
        resumed = msgspec.structs.replace(whole, attempt_id=new_attempt_id(), resume=tuple(want[:9]))
        fleet["p"].engine.prefill(prefill_leg(resumed))
        fleet["d"].engine.decode(decode_leg(resumed, await fleet["p"].ticket(resumed.attempt_id)))
        end = await fleet["d"].ended(resumed.attempt_id)
        assert isinstance(end, Finished)
        tokens = [event for event in fleet["d"].events[resumed.attempt_id] if isinstance(event, Tokens)]
        assert [token_id for event in tokens for token_id in event.token_ids] == want[9:]
        assert fleet["d"].engine.load().num_remote_prefills == 1


async def test_a_worker_that_gets_both_legs_serves_them_as_one():
    async with fleet_of("alone", "both") as fleet:
        for handoff in (pulled, met):
            request = request_for(prompt(40), max_tokens=6)
            assert await handoff(fleet["both"], fleet["both"], request) == await aggregated(fleet["alone"], request)
        await fleet.until_empty()


# ---- leases ----


def losing(*kinds: type, times: int | None = None):
    """Return a meddler that loses messages of these kinds (only the first `times` of each)."""
    lost: dict[type, int] = {}

    async def meddle(worker, message):
        if not isinstance(message, kinds):
            return 1
        lost[type(message)] = lost.get(type(message), 0) + 1
        return 1 if times is not None and lost[type(message)] > times else 0

    return meddle


async def one_slot_taken(decode: Host) -> None:
    """Fill decode's only slot for about a second."""
    decode.engine.decode(decode_leg(request_for(prompt(3), max_tokens=40)))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_lease_that_ends_while_decode_queues_never_becomes_wrong_text(policy):
    options = HandoffOptions(kv_load_failure=policy, lease_s=0.15, ask_s=0.1)
    async with (
        fleet_of("alone", "p", options=options, num_blocks="8") as fleet,
        running(fleet, "d", options=options, max_num_seqs="1", decode_ms_per_step="10"),
    ):
        fleet.link.meddle = losing(LeaseRequest)
        await one_slot_taken(fleet["d"])
        request = request_for(prompt(40), max_tokens=20)
        fleet["p"].engine.prefill(prefill_leg(request))
        fleet["d"].engine.decode(decode_leg(request, await fleet["p"].ticket(request.attempt_id)))
        await fleet["p"].until(fleet["p"].is_empty)
        for salt in range(1, 5):  # other prompts take the blocks
            await aggregated(fleet["p"], request_for(prompt(100, salt=salt)))
        end = await fleet["d"].ended(request.attempt_id)
        if policy == "fail":
            assert isinstance(end, Failed)
            assert end.error.code == "kv_lease_expired"
            assert fleet["d"].engine.load().num_recomputed_tokens == 0
        else:
            assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
            assert fleet["d"].engine.load().num_recomputed_tokens == 40
            assert fleet["d"].engine.load().num_remote_prefills == 0
        await fleet.until_empty()


async def test_a_lease_does_not_time_decodes_queue():
    options = HandoffOptions(lease_s=0.3)
    async with (
        fleet_of("p", options=options, num_blocks="256") as fleet,
        running(fleet, "d", options=options, max_num_seqs="4", decode_ms_per_step="8"),
    ):
        fleet.introduce()
        requests = [request_for(prompt(20, salt=n), max_tokens=10) for n in range(32)]
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(pulled(fleet["p"], fleet["d"], request))
        load = fleet["d"].engine.load()
        assert (load.num_remote_prefills, load.num_recomputed_tokens) == (32, 0)
        assert fleet.link.count(LeaseRequest) > 10
        await fleet.until_empty()


async def test_a_ticket_nobody_uses_frees_its_blocks_within_the_lease():
    async with fleet_of("p", options=HandoffOptions(lease_s=0.2)) as fleet:
        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request))
        await fleet["p"].ticket(request.attempt_id)
        assert fleet["p"].engine.load().num_held == 1
        await fleet["p"].until(fleet["p"].is_empty, within_s=1.0)


# ---- faults on the way ----


@pytest.mark.parametrize("fetch", FETCHES)
async def test_doubled_and_lost_messages_change_nothing(fetch):
    options = HandoffOptions(fetch=fetch, ask_s=0.05)
    async with fleet_of("alone", "p", "d", options=options) as fleet:
        request = request_for(prompt(40), max_tokens=20)
        want = await aggregated(fleet["alone"], request)

        async def double(worker, message):
            return 2

        for meddle in (double, losing(ConfirmRequest, times=2)):
            fleet.link.meddle = meddle
            again = msgspec.structs.replace(request, attempt_id=new_attempt_id(), cache_salt=str(id(meddle)))
            assert await pulled(fleet["p"], fleet["d"], again) == want
        assert fleet["d"].engine.load().num_recomputed_tokens == 0
        await fleet.until_empty()


async def test_a_confirmation_whose_answer_was_lost_is_answered_again_with_the_same_verdict():
    async with fleet_of("p", "d") as fleet:
        request = request_for(prompt(40))
        ticket_of = await pulled_ticket(fleet, request)
        await fleet["d"].output(request.attempt_id)
        question = ConfirmRequest(attempt_id=request.attempt_id, epoch=ticket_of.epoch)
        for _ in range(2):
            assert (await fleet["p"].engine.answer(question)).is_good
        unknown = ConfirmRequest(attempt_id=new_attempt_id(), epoch=ticket_of.epoch)
        assert not (await fleet["p"].engine.answer(unknown)).is_good


async def pulled_ticket(fleet: Fleet, request) -> KvTicket:
    fleet["p"].engine.prefill(prefill_leg(request))
    ticket = await fleet["p"].ticket(request.attempt_id)
    fleet["d"].engine.decode(decode_leg(request, ticket))
    return ticket


async def test_legs_delivered_twice_run_once():
    async with fleet_of("alone", "p", "d", prefill_ms_per_token="0.5") as fleet:
        request = request_for(prompt(40), max_tokens=6)
        for _ in range(2):
            fleet["p"].engine.prefill(prefill_leg(request))
        ticket = await fleet["p"].ticket(request.attempt_id)
        for _ in range(2):
            fleet["d"].engine.decode(decode_leg(request, ticket))
        assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
        await fleet.until_empty()


async def test_a_refusal_by_decode_frees_prefill_at_once():
    async with fleet_of("p", options=HandoffOptions(lease_s=60)) as fleet, running(fleet, "d", num_blocks="4"):
        fleet.introduce()
        request = request_for(prompt(40), max_tokens=200)
        fleet["p"].engine.prefill(prefill_leg(request))
        ticket = await fleet["p"].ticket(request.attempt_id)
        with pytest.raises(RequestError) as caught:
            fleet["d"].engine.decode(decode_leg(request, ticket))
        assert caught.value.param == "max_tokens"
        await fleet["p"].until(fleet["p"].is_empty, within_s=0.5)
        await fleet.until_empty()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("wrong", ["epoch", "layout", "num_tokens"])
async def test_a_ticket_that_cannot_be_used_is_recomputed_or_failed(policy, wrong):
    async with fleet_of("alone", "p", "d", options=HandoffOptions(kv_load_failure=policy)) as fleet:
        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request))
        ticket = await fleet["p"].ticket(request.attempt_id)
        value = {"epoch": Epoch(7), "layout": "other", "num_tokens": 39}[wrong]
        fleet["d"].engine.decode(decode_leg(request, msgspec.structs.replace(ticket, **{wrong: value})))
        if policy == "fail":
            assert isinstance(await fleet["d"].ended(request.attempt_id), Failed)
        else:
            assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
            assert fleet["d"].engine.load().num_recomputed_tokens == 40
        await fleet.until_empty()


async def test_many_prompts_recomputed_for_one_reason_are_few_lines_in_the_log(capsys):
    before = logging.getLogger().handlers[:]
    setup_logging(LogConfig(max_repeats_per_minute=5), service="d")
    try:
        async with fleet_of("p", "d", num_blocks="512") as fleet:
            for number in range(30):
                request = request_for(prompt(40, salt=number))
                fleet["p"].engine.prefill(prefill_leg(request))
                ticket = msgspec.structs.replace(await fleet["p"].ticket(request.attempt_id), layout="other")
                fleet["d"].engine.decode(decode_leg(request, ticket))
                await fleet["d"].ended(request.attempt_id)
            assert fleet["d"].engine.load().num_recomputed_tokens == 30 * 40
            await fleet.until_empty()
    finally:
        logging.getLogger().handlers[:] = before
    lines = capsys.readouterr().err.splitlines()
    assert sum("recomputing" in line for line in lines) == len(lines) == 5


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_prefill_worker_that_left_is_noticed_at_once(policy):
    options = HandoffOptions(kv_load_failure=policy, lease_s=60)
    async with fleet_of("alone", "d", options=options) as fleet:
        fleet.introduce()
        request = request_for(prompt(40))
        async with running(fleet, "p", options=options) as p:
            fleet.introduce()
            p.engine.prefill(prefill_leg(request))
            ticket = await p.ticket(request.attempt_id)
        started = time.monotonic()
        fleet["d"].engine.decode(decode_leg(request, ticket))
        fleet["d"].engine.peer_left(p.worker, p.epoch)
        end = await fleet["d"].ended(request.attempt_id)
        assert time.monotonic() - started < 1.5
        if policy == "fail":
            assert isinstance(end, Failed)
            assert end.error.code == "worker_lost"
        else:
            assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
        await fleet.until_empty()


async def test_a_prefill_worker_restarted_under_its_name_serves_on():
    async with fleet_of("alone", "d") as fleet:
        for salt in range(3):
            async with running(fleet, "p"):
                fleet.introduce()
                request = request_for(prompt(40, salt=salt))
                want = await aggregated(fleet["alone"], request)
                assert await pulled(fleet["p"], fleet["d"], request) == want
        assert fleet["d"].engine.load().num_remote_prefills == 3


async def test_a_ticket_of_a_stranger_makes_its_own_introduction():
    fleet = Fleet(LocalLink())
    async with running(fleet, "p"), running(fleet, "d"), running(fleet, "alone"):
        request = request_for(prompt(40))
        assert await pulled(fleet["p"], fleet["d"], request) == await aggregated(fleet["alone"], request)
        assert fleet.link.count(MetadataRequest) == 1


@pytest.mark.parametrize("own", [True, False])
async def test_a_transfer_has_a_deadline(own, tmp_path):
    """The request's own deadline ends it; without one our default makes it a failed transfer, here recomputed."""
    options = HandoffOptions(transfer_s=60 if own else 0.2)
    pauses = Pauses(tmp_path)
    async with (
        fleet_of("alone", "p", options=options) as fleet,
        running(fleet, "d", options=options, pause_dir=str(tmp_path)),
    ):
        deadlines = Deadlines(transfer=time.time() + 0.4) if own else Deadlines()
        request = request_for(prompt(40), deadlines=deadlines)
        with pauses.at("mid_transfer"):
            await pulled_ticket(fleet, request)
            end = await fleet["d"].ended(request.attempt_id)
        if own:
            assert isinstance(end, Failed)
            assert (end.error.code, end.error.phase) == ("deadline_exceeded", "transfer")
        else:
            assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
            assert fleet["d"].engine.load().num_recomputed_tokens == 40
        await fleet.until_empty()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_blocks_of_a_stuck_read_are_used_by_nobody_until_it_is_over(policy):
    options = HandoffOptions(transfer_s=0.1, lease_s=60, kv_load_failure=policy)
    sizes = {"num_blocks": "64", "kv_bytes_per_token": "65536"}
    async with (
        fleet_of("alone", "p", options=options, **sizes) as fleet,
        running(fleet, "d", options=options, transfer=ShmTransfer(gb_per_s=0.017), **sizes),
    ):
        request = request_for(prompt(16 * 20), max_tokens=4)  # 20 MiB, a piece of 16 MiB takes a second
        d = fleet["d"]
        await pulled_ticket(fleet, request)
        await d.until(lambda: d.engine.load().kv_blocks_quarantined == 20)
        if policy == "fail":
            assert isinstance(await d.ended(request.attempt_id), Failed)
        else:
            assert await d.output(request.attempt_id) == await aggregated(fleet["alone"], request)
            assert d.engine.load().num_recomputed_tokens == 320
        assert d.engine.load().kv_blocks_quarantined == 20
        await fleet.until_empty()


# ---- aborts ----


@pytest.mark.parametrize("fetch", FETCHES)
@pytest.mark.parametrize(
    "point", ["before_prefill", "before_ticket", "ticket", "mid_transfer", "before_confirm", "decoding"]
)
@pytest.mark.parametrize("loud", [False, True])
async def test_an_abort_in_any_phase_leaves_nothing_on_either_side(fetch, point, loud, tmp_path):
    options = HandoffOptions(fetch=fetch, lease_s=60, transfer_s=60)
    pauses = Pauses(tmp_path)
    async with (
        fleet_of(options=options) as fleet,
        running(fleet, "p", options=options, pause_dir=str(tmp_path)),
        running(fleet, "d", options=options, pause_dir=str(tmp_path), decode_ms_per_step="2"),
    ):
        p, d = fleet["p"], fleet["d"]
        request = request_for(prompt(40), max_tokens=200)
        error = RequestError("the test gave it up").record() if loud else None
        with pauses.at(point):
            p.engine.prefill(prefill_leg(request))
            if point in ("before_prefill", "before_ticket"):
                await p.until(lambda: pauses.hits(point) > 0)
            else:
                ticket = await p.ticket(request.attempt_id)
                if point != "ticket":
                    d.engine.decode(decode_leg(request, ticket))
                if point == "decoding":
                    await d.until(lambda: bool(d.events))
                elif point != "ticket":
                    await d.until(lambda: pauses.hits(point) > 0)
            victim = p if point in ("before_prefill", "before_ticket", "ticket") else d
            for _ in range(2):
                victim.engine.abort(request.attempt_id, error)
        if loud:
            await victim.until(lambda: bool(ends_of(victim, request)))
        await fleet.until_empty()
        ends = ends_of(victim, request)
        if point == "ticket":
            assert [type(event) for event in ends] == [PrefillDone]
        elif loud:
            assert [type(event) for event in ends] == [PrefillFailed if victim is p else Failed]
            assert ends[0].error.message == "the test gave it up"
        else:
            assert not ends


def ends_of(host: Host, request) -> list[EngineEvent]:
    return [event for event in host.events.get(request.attempt_id, []) if not isinstance(event, Begun | Tokens)]


async def test_an_abort_at_prefill_after_the_ticket_spoils_the_fetch_not_the_text():
    async with fleet_of("alone", "p", "d") as fleet:
        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request))
        ticket = await fleet["p"].ticket(request.attempt_id)
        fleet["p"].engine.abort(request.attempt_id)
        await fleet["p"].until(fleet["p"].is_empty)
        fleet["d"].engine.decode(decode_leg(request, ticket))
        assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
        assert fleet["d"].engine.load().num_recomputed_tokens > 0
        await fleet.until_empty()


async def test_two_hundred_aborted_waits_for_blocks_leave_nothing():
    options = HandoffOptions(lease_s=60)
    async with (
        fleet_of("p", options=options, num_blocks="1024", max_num_seqs="256") as fleet,
        running(fleet, "d", options=options, max_num_seqs="1", decode_ms_per_step="5"),
    ):
        fleet.introduce()
        blocker = request_for(prompt(3), max_tokens=400)
        fleet["d"].engine.decode(decode_leg(blocker))
        requests = [request_for(prompt(20, salt=n)) for n in range(200)]
        for request in requests:
            fleet["p"].engine.prefill(prefill_leg(request))
        for request in requests:
            fleet["d"].engine.decode(decode_leg(request, await fleet["p"].ticket(request.attempt_id)))
        for request in (*requests, blocker):
            fleet["d"].engine.abort(request.attempt_id)
        await fleet.until_empty()
        assert fleet.link.count(Stranded) >= 200
