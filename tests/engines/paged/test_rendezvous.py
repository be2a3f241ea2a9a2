"""Rendezvous: chunks move while the next are computed, the legs come in either order, and each end reaches both."""

import asyncio
import time

import msgspec
import pytest

from schemas.errors import AbortedError, CapacityError, RequestError
from schemas.frames import Begun, Failed, Finished, Tokens
from schemas.hop import PrefillDone, PrefillFailed
from schemas.ids import Epoch, new_attempt_id
from schemas.peer import Landed, LeaseRequest, MeetRequest, Stranded
from schemas.request import Deadlines, StopConditions
from services.engines.paged.handoff import HandoffOptions
from services.kv.shm import ShmTransfer
from tests.engines.paged.fleet import (
    Pauses,
    aggregated,
    decode_leg,
    fleet_of,
    met,
    prefill_leg,
    prompt,
    request_for,
    room_of,
    running,
)

CHUNKED = {"num_blocks": "512", "max_batched_tokens": "32"}


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_legs_come_in_either_order(first):
    async with fleet_of("alone", "p", "d", **CHUNKED) as fleet:
        for length in (1, 31, 32, 33, 200):
            request = request_for(prompt(length), max_tokens=6)
            want = await aggregated(fleet["alone"], request)
            room = room_of(fleet["p"])
            if first == "prefill":
                fleet["p"].engine.prefill(prefill_leg(request, room))
                await fleet["p"].until(lambda: fleet["p"].engine.load().num_held == 1)
                fleet["d"].engine.decode(decode_leg(request, room))
            else:
                num_meets = fleet.link.count(MeetRequest)
                fleet["d"].engine.decode(decode_leg(request, room))
                await fleet["d"].until(lambda seen=num_meets: fleet.link.count(MeetRequest) > seen + 1)
                fleet["p"].engine.prefill(prefill_leg(request, room))
            assert await fleet["d"].output(request.attempt_id) == want
            assert isinstance(await fleet["p"].result(request.attempt_id), PrefillDone)
        load = fleet["d"].engine.load()
        assert (load.num_remote_prefills, load.num_recomputed_tokens) == (5, 0)
        await fleet.until_empty()


async def test_many_requests_at_once_say_what_one_engine_says():
    async with fleet_of("alone", "p", "d", **CHUNKED) as fleet:
        requests = [request_for(prompt(1 + 13 * n % 170, salt=n), max_tokens=1 + n % 9) for n in range(24)]
        async with asyncio.TaskGroup() as tasks:
            wanted = [tasks.create_task(aggregated(fleet["alone"], request)) for request in requests]
            got = [tasks.create_task(met(fleet["p"], fleet["d"], request)) for request in requests]
        assert [task.result() for task in got] == [task.result() for task in wanted]
        load = fleet["d"].engine.load()
        assert load.num_remote_prefills == 24
        assert load.kv_transfer_bytes == {"shm": 256 * sum(-(-len(r.token_ids) // 16) for r in requests)}
        await fleet.until_empty()


async def test_chunks_arrive_before_the_prompt_is_done(tmp_path):
    async with (
        fleet_of("d", **CHUNKED) as fleet,
        running(fleet, "p", prefill_ms_per_token="1", **CHUNKED),
    ):
        fleet.introduce()
        request = request_for(prompt(320), max_tokens=2)
        room = room_of(fleet["p"])
        fleet["d"].engine.decode(decode_leg(request, room))
        fleet["p"].engine.prefill(prefill_leg(request, room))
        await fleet["d"].output(request.attempt_id)
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Finished)
        landed = next(message for _, message in fleet.link.sent if isinstance(message, Landed))
        assert landed.num_bytes == 20 * 256
        # The writes began with the first chunk of ten, so they overlap most of the prompt's computation.
        assert landed.transfer_s > 0.6 * landed.prefill_s > 0.1
        assert 0.8 * landed.prefill_s < end.timings.prefill_s <= landed.prefill_s
        assert end.timings.transfer_s < 0.5 * landed.prefill_s
        assert end.timings.overlap_s == pytest.approx(landed.transfer_s - landed.last_transfer_s)
        assert end.timings.kv_bytes == landed.num_bytes


async def test_decodes_own_prefix_is_not_written():
    async with fleet_of("alone", "p", "d", **CHUNKED) as fleet:
        for token_ids in (prompt(64), (*prompt(64), *prompt(40, salt=3)), (*prompt(64), *prompt(40, salt=3))):
            request = request_for(token_ids)
            assert await met(fleet["p"], fleet["d"], request) == await aggregated(fleet["alone"], request)
        assert fleet["d"].engine.load().kv_transfer_bytes == {"shm": (4 + 3 + 1) * 256}
        await fleet.until_empty()


async def test_the_first_token_may_end_the_request_and_decode_says_so():
    async with fleet_of("alone", "p", "d") as fleet:
        one = request_for(prompt(20), max_tokens=1)
        want = await aggregated(fleet["alone"], one)
        assert await met(fleet["p"], fleet["d"], one) == want
        stop = StopConditions(max_tokens=9, stop_token_ids=(want[0],))
        stopped = msgspec.structs.replace(one, attempt_id=new_attempt_id(), stop=stop)
        assert await met(fleet["p"], fleet["d"], stopped) == want
        end = await fleet["d"].ended(stopped.attempt_id)
        assert isinstance(end, Finished)
        assert end.reason == "stop"
        longer = request_for(prompt(20), max_tokens=20)  # what was cached by those is right
        assert await met(fleet["p"], fleet["d"], longer) == await aggregated(fleet["alone"], longer)
        await fleet.until_empty()


async def test_prompts_that_differ_never_meet():
    async with fleet_of("p", "d", options=HandoffOptions(lease_s=60)) as fleet:
        request = request_for(prompt(40))
        room = room_of(fleet["p"])
        fleet["p"].engine.prefill(prefill_leg(request, room))
        fleet["d"].engine.decode(decode_leg(msgspec.structs.replace(request, token_ids=prompt(40, salt=1)), room))
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Failed)
        assert end.error.code == "kv_mismatch"
        assert isinstance(await fleet["p"].result(request.attempt_id), PrefillFailed)
        await fleet.until_empty()


@pytest.mark.parametrize("wrong", ["room", "epoch"])
async def test_another_room_or_epoch_is_refused(wrong):
    async with fleet_of("p", "d", options=HandoffOptions(kv_load_failure="fail")) as fleet:
        request = request_for(prompt(40))
        room = room_of(fleet["p"])
        other = msgspec.structs.replace(room, **{wrong: Epoch(5)})
        fleet["p"].engine.prefill(prefill_leg(request, room))
        fleet["d"].engine.decode(decode_leg(request, other))
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Failed)
        assert end.error.code == "worker_lost"
        await fleet.until_empty()
        with pytest.raises(CapacityError):
            fleet["p"].engine.prefill(prefill_leg(request_for(prompt(3)), msgspec.structs.replace(room, epoch=5)))


async def test_decode_may_queue_for_longer_than_a_lease():
    options = HandoffOptions(lease_s=0.2)
    async with (
        fleet_of("alone", "p", options=options) as fleet,
        running(fleet, "d", options=options, max_num_seqs="1", decode_ms_per_step="10"),
    ):
        fleet.introduce()
        blocker = request_for(prompt(3), max_tokens=80)
        fleet["d"].engine.decode(decode_leg(blocker))
        request = request_for(prompt(40))
        assert await met(fleet["p"], fleet["d"], request) == await aggregated(fleet["alone"], request)
        assert fleet["d"].engine.load().num_recomputed_tokens == 0
        assert fleet.link.count(LeaseRequest) > 3
        await fleet.until_empty()


async def test_legs_in_opposite_orders_at_full_pools_dont_wait_for_each_other():
    """One waits at prefill for decode's blocks, the other at decode for prefill's."""
    async with fleet_of("alone", "p", "d", num_blocks="32") as fleet:
        one, other = (request_for(prompt(300, salt=salt), max_tokens=4) for salt in (1, 2))
        wanted = [await aggregated(fleet["alone"], request) for request in (one, other)]
        rooms = [room_of(fleet["p"]), room_of(fleet["p"])]
        fleet["p"].engine.prefill(prefill_leg(one, rooms[0]))
        fleet["p"].engine.prefill(prefill_leg(other, rooms[1]))
        fleet["d"].engine.decode(decode_leg(other, rooms[1]))
        fleet["d"].engine.decode(decode_leg(one, rooms[0]))
        assert [await fleet["d"].output(request.attempt_id) for request in (one, other)] == wanted
        for request in (one, other):
            assert isinstance(await fleet["p"].result(request.attempt_id), PrefillDone)
        load = fleet["d"].engine.load()
        assert (load.num_remote_prefills, load.num_recomputed_tokens) == (2, 0)
        await fleet.until_empty()


async def test_a_room_that_decode_never_enters_is_freed_within_the_lease():
    async with fleet_of("p", options=HandoffOptions(lease_s=0.2)) as fleet:
        request = request_for(prompt(40))
        fleet["p"].engine.prefill(prefill_leg(request, room_of(fleet["p"])))
        result = await fleet["p"].result(request.attempt_id)
        assert isinstance(result, PrefillFailed)
        assert result.error.code == "kv_lease_expired"
        await fleet.until_empty()


async def test_a_prefill_leg_given_up_while_decode_queues_is_no_abort_of_the_request():
    """Aborted by its leaving worker, or tired of waiting: decode computes the prompt itself, or fails so that another
    attempt may be made."""
    async with fleet_of("alone", "p", "d") as fleet:
        request = request_for(prompt(40))
        room = room_of(fleet["p"])
        fleet["d"].engine.decode(decode_leg(request, room))
        await fleet["d"].until(lambda: fleet.link.count(MeetRequest) > 0)
        await fleet["d"].engine.answer(Stranded(attempt_id=request.attempt_id, error=AbortedError("leaving").record()))
        assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
        await fleet.until_empty()


async def test_a_room_that_prefill_never_enters_ends_with_the_deadline():
    async with fleet_of("p", "d") as fleet:
        request = request_for(prompt(40), deadlines=Deadlines(first_token=time.time() + 0.3))
        fleet["d"].engine.decode(decode_leg(request, room_of(fleet["p"])))
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Failed)
        assert end.error.code == "deadline_exceeded"
        await fleet.until_empty()


async def test_a_prefill_leg_that_comes_after_decode_gave_up_is_refused():
    async with fleet_of("p", "d") as fleet:
        request = request_for(prompt(40))
        room = room_of(fleet["p"])
        fleet["d"].engine.decode(decode_leg(request, room))
        await fleet["d"].until(lambda: fleet.link.count(MeetRequest) > 0)
        fleet["d"].engine.abort(request.attempt_id)
        await fleet["d"].until(lambda: fleet.link.count(Stranded) > 0)
        await fleet.until_empty()
        with pytest.raises(CapacityError):
            fleet["p"].engine.prefill(prefill_leg(request, room))
        assert not fleet["d"].events


async def test_lost_and_doubled_messages_change_nothing():
    async with fleet_of("alone", "p", "d", options=HandoffOptions(ask_s=0.05), **CHUNKED) as fleet:
        lost: set[type] = set()

        async def lose_first(worker, message):
            if isinstance(message, MeetRequest | Landed) and type(message) not in lost:
                lost.add(type(message))
                return 0
            return 2

        fleet.link.meddle = lose_first
        for salt in range(2):
            request = request_for(prompt(100, salt=salt))
            assert await met(fleet["p"], fleet["d"], request) == await aggregated(fleet["alone"], request)
        assert fleet["d"].engine.load().num_remote_prefills == 2
        assert len(lost) == 2
        await fleet.until_empty()


async def test_a_meeting_asked_again_when_all_has_landed_spoils_nothing():
    async with fleet_of("alone", "p", "d", options=HandoffOptions(ask_s=0.2)) as fleet:
        request = request_for(prompt(40))
        want = await aggregated(fleet["alone"], request)
        p, room = fleet["p"], room_of(fleet["p"])

        is_asked_again = asyncio.Event()

        async def lose_the_first_answer(worker, message):
            if isinstance(message, Landed):
                await is_asked_again.wait()
            elif isinstance(message, MeetRequest) and fleet.link.count(MeetRequest) == 1:
                await p.engine.answer(message)
                return 0
            elif isinstance(message, MeetRequest):
                is_asked_again.set()
                await p.result(request.attempt_id)
            return 1

        fleet.link.meddle = lose_the_first_answer
        p.engine.prefill(prefill_leg(request, room))
        fleet["d"].engine.decode(decode_leg(request, room))
        assert await fleet["d"].output(request.attempt_id) == want
        assert fleet["d"].engine.load().num_recomputed_tokens == 0
        await fleet.until_empty()


async def test_a_landed_whose_answer_was_lost_is_answered_again():
    async with fleet_of("p", "d") as fleet:
        request = request_for(prompt(40))
        await met(fleet["p"], fleet["d"], request)
        landed = next(message for _, message in fleet.link.sent if isinstance(message, Landed))
        await fleet["d"].engine.answer(landed)
        await fleet.until_empty()


# ---- each end reaches both ----


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("point", ["before_prefill", "mid_transfer"])
async def test_a_failing_prefill_reaches_decode_at_once(policy, point, tmp_path):
    options = HandoffOptions(kv_load_failure=policy, lease_s=60)
    pauses = Pauses(tmp_path)
    async with (
        fleet_of("alone", "d", options=options, **CHUNKED) as fleet,
        running(fleet, "p", options=options, pause_dir=str(tmp_path), **CHUNKED),
    ):
        fleet.introduce()
        request = request_for(prompt(100))
        room = room_of(fleet["p"])
        with pauses.at(point):
            fleet["d"].engine.decode(decode_leg(request, room))
            fleet["p"].engine.prefill(prefill_leg(request, room))
            await fleet["p"].until(lambda: pauses.hits(point) > 0 and fleet.link.count(MeetRequest) > 0)
            await asyncio.sleep(0.05)  # the meeting is answered
            started = time.monotonic()
            failure = CapacityError("the device burns", phase="prefill").record()
            fleet["p"].engine.abort(request.attempt_id, failure)
            if policy == "fail":
                end = await fleet["d"].ended(request.attempt_id)
                assert isinstance(end, Failed)
                assert end.error.message == "the device burns"
                assert time.monotonic() - started < 1.0
        if policy == "recompute":
            assert await fleet["d"].output(request.attempt_id) == await aggregated(fleet["alone"], request)
            assert fleet["d"].engine.load().num_recomputed_tokens == 100
        result = await fleet["p"].result(request.attempt_id)
        assert isinstance(result, PrefillFailed)
        assert result.error == failure
        await fleet.until_empty()


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("point", ["before_prefill", "mid_transfer", "waiting", "decoding"])
@pytest.mark.parametrize("loud", [False, True])
async def test_an_abort_in_any_phase_leaves_nothing_on_either_side(side, point, loud, tmp_path):
    options = HandoffOptions(lease_s=60, transfer_s=60)
    pauses = Pauses(tmp_path)
    async with (
        fleet_of(options=options) as fleet,
        running(fleet, "p", options=options, pause_dir=str(tmp_path), **CHUNKED),
        running(fleet, "d", options=options, decode_ms_per_step="2", **CHUNKED),
    ):
        p, d = fleet["p"], fleet["d"]
        request = request_for(prompt(100), max_tokens=200)
        error = RequestError("the test gave it up").record() if loud else None
        room = room_of(p)
        with pauses.at(point):
            d.engine.decode(decode_leg(request, room))
            if point != "waiting":
                p.engine.prefill(prefill_leg(request, room))
            if point == "decoding":
                await d.until(lambda: bool(d.events))
            elif point == "waiting":
                await d.until(lambda: fleet.link.count(MeetRequest) > 0)
            else:
                await p.until(lambda: pauses.hits(point) > 0)
            for _ in range(2):
                fleet[side].engine.abort(request.attempt_id, error)
        if (side, point) in (("p", "waiting"), ("p", "decoding")):
            d.engine.abort(request.attempt_id)
        await fleet.until_empty()
        if side == "d" and not loud:
            assert all(isinstance(event, Begun | Tokens) for event in d.events.get(request.attempt_id, []))
        elif side == "d":
            end = await d.ended(request.attempt_id)
            assert isinstance(end, Failed)
            assert end.error.message == "the test gave it up"


async def test_blocks_under_a_write_stay_in_quarantine_until_it_has_settled():
    """Decode gives up while prefill is writing: its blocks are nobody's until prefill says that it writes no more."""
    options = HandoffOptions(lease_s=60, ask_s=0.1)
    async with (
        fleet_of("d", options=options, num_blocks="64", kv_bytes_per_token="65536", block_size="16") as fleet,
        running(
            fleet,
            "p",
            options=options,
            transfer=ShmTransfer(gb_per_s=0.05),
            num_blocks="64",
            kv_bytes_per_token="65536",
            block_size="16",
        ),
    ):
        fleet.introduce()
        request = request_for(prompt(16 * 20), max_tokens=4)  # 20 MiB at 50 MB/s
        room = room_of(fleet["p"])
        fleet["d"].engine.decode(decode_leg(request, room))
        fleet["p"].engine.prefill(prefill_leg(request, room))
        await fleet["p"].until(lambda: fleet["p"].engine.load().num_held == 1)
        await asyncio.sleep(0.05)  # into the transfer
        fleet["d"].engine.abort(request.attempt_id)
        await fleet["d"].until(lambda: fleet["d"].engine.load().kv_blocks_quarantined == 20)
        assert fleet["d"].engine.load().kv_blocks_used in (0, 20)
        await fleet.until_empty()


async def test_decode_leaving_frees_prefill_and_prefill_leaving_ends_decode(tmp_path):
    options = HandoffOptions(lease_s=60, transfer_s=60, kv_load_failure="fail")
    pauses = Pauses(tmp_path)
    async with (
        fleet_of(options=options) as fleet,
        running(fleet, "p", options=options, pause_dir=str(tmp_path), **CHUNKED),
        running(fleet, "d", options=options, **CHUNKED),
    ):
        fleet.introduce()
        for gone, left in (("d", "p"), ("p", "d")):
            request = request_for(prompt(100))
            room = room_of(fleet["p"])
            with pauses.at("mid_transfer"):
                num_hits = pauses.hits("mid_transfer")
                fleet["d"].engine.decode(decode_leg(request, room))
                fleet["p"].engine.prefill(prefill_leg(request, room))
                await fleet["p"].until(lambda seen=num_hits: pauses.hits("mid_transfer") > seen)
                fleet[left].engine.peer_left(fleet[gone].worker, fleet[gone].epoch)
                end = await (fleet["d"].ended if left == "d" else fleet["p"].result)(request.attempt_id)
                assert end.error.code == "worker_lost"
            await fleet.until_empty()
            fleet.introduce()


async def test_a_refusal_by_decode_frees_prefill_at_once():
    async with fleet_of("p", options=HandoffOptions(lease_s=60)) as fleet, running(fleet, "d", num_blocks="4"):
        fleet.introduce()
        request = request_for(prompt(40), max_tokens=200)
        room = room_of(fleet["p"])
        fleet["p"].engine.prefill(prefill_leg(request, room))
        with pytest.raises(RequestError):
            fleet["d"].engine.decode(decode_leg(request, room))
        assert isinstance(await fleet["p"].result(request.attempt_id), PrefillFailed)
        await fleet.until_empty()


async def test_a_refusal_by_prefill_reaches_a_known_decode_worker():
    options = HandoffOptions(kv_load_failure="recompute")
    async with fleet_of("d", options=options) as fleet, running(fleet, "p", num_blocks="2"):
        fleet.introduce()
        request = request_for(prompt(100))
        room = room_of(fleet["p"])
        fleet["d"].engine.decode(decode_leg(request, room))
        leg = msgspec.structs.replace(prefill_leg(request, room), decode_worker=fleet["d"].worker)
        with pytest.raises(RequestError) as caught:
            fleet["p"].engine.prefill(leg)
        end = await fleet["d"].ended(request.attempt_id)
        assert isinstance(end, Failed)
        assert end.error.message == caught.value.message
        await fleet.until_empty()
