"""What every engine must do, done by the TensorRT-LLM adapter over a stand-in of its LLM API."""

import asyncio

import msgspec
import pytest

from schemas.errors import AbortedError, EngineError, KvMismatchError, RequestError, WorkerLostError
from schemas.frames import Failed, Finished, TokenLogprobs, Tokens
from schemas.handoff import KvTicket, TrtllmDisaggregatedParams
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import Epoch, WorkerId, new_attempt_id
from schemas.peer import ConfirmRequest, LeaseRequest
from schemas.request import Sampling, StopConditions
from services.engines.trtllm.completion import UNKNOWN_LOGPROB
from tests.engines.paged.fleet import aggregated, decode_leg, prefill_leg, prompt, pulled, request_for
from tests.engines.trtllm.scene import CARD, SOON, Scene, handed_over, scene_of, seated
from tests.engines.trtllm.stand_in import RequestOutput

pytestmark = pytest.mark.usefixtures("no_leaks")

EOS, OTHER_EOS = CARD.eos_token_ids


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 90])
async def test_disaggregated_output_equals_aggregated_output(length, is_older):
    async with scene_of(is_older=is_older) as scene:
        for max_tokens in (1, 2, 3, 20):
            request = request_for(prompt(length), max_tokens=max_tokens)
            both = await pulled(scene["p"].host, scene["d"].host, request)
            assert both == await aggregated(scene["both"].host, request)
            assert len(both) == max_tokens
        assert scene["d"].executor.num_transfers == 3  # one token needs no decode leg
        await scene.until_empty()


async def test_the_kv_is_really_used():
    async with scene_of() as scene:
        request = request_for(prompt(30), max_tokens=9)
        done = await handed_over(scene["p"], request)
        wrong = msgspec.structs.replace(request, token_ids=prompt(30, salt=5))
        scene["d"].engine.decode(decode_leg(wrong, done.params))
        assert await scene["d"].host.output(request.attempt_id) == await aggregated(scene["both"].host, request)
        assert scene["d"].executor.num_computed_prompt_tokens == 1  # the warm-up's
        await scene.until_empty()


async def test_usage_and_load_count_each_token_once():
    async with scene_of() as scene:
        for expected in (0, 28):
            request = request_for(prompt(30), max_tokens=9)
            await pulled(scene["p"].host, scene["d"].host, request)
            end = await scene["d"].host.ended(request.attempt_id)
            assert isinstance(end, Finished)
            assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (30, 9, expected)
            assert end.usage.num_computed_prompt_tokens == 0
        await scene.until_empty()
        p, d = scene["p"].engine.load(), scene["d"].engine.load()
        assert (p.num_prompt_tokens, p.num_cached_tokens, p.num_generated_tokens) == (60, 28, 2)
        assert (d.num_prompt_tokens, d.num_remote_prefills, d.num_generated_tokens) == (0, 2, 18)
        assert d.progress > 0


async def test_no_tenant_shares_anothers_kv():
    async with scene_of() as scene:
        hits = []
        for salt in ("a", "b", "a"):
            request = request_for(prompt(30), max_tokens=3, cache_salt=salt)
            await pulled(scene["p"].host, scene["d"].host, request)
            end = await scene["d"].host.ended(request.attempt_id)
            assert isinstance(end, Finished)
            hits.append(end.usage.cached_tokens)
        assert hits == [0, 0, 28]
        assert {one.cache_salt for one in scene["d"].executor.submitted[1:]} == {"a", "b"}


async def test_priority_and_trace_go_along_on_both_phases():
    async with scene_of() as scene:
        for priority in (-5, 0, 3, 2**31 - 1):
            request = request_for(prompt(9), max_tokens=3, priority=priority, traceparent=f"00-{priority}")
            await pulled(scene["p"].host, scene["d"].host, request)
        for seat in (scene["p"], scene["d"]):
            own = seat.executor.submitted[1:]
            assert [one.trace_headers for one in own] == [{"traceparent": f"00-{one}"} for one in (-5, 0, 3, 2**31 - 1)]
            given = [one.priority for one in own]
            assert given == sorted(set(given)), "the higher the sooner, on both sides"
            assert given[1] == 0.5
            assert all(0.0 < one < 1.0 for one in given)


async def test_thirty_two_at_once_with_chunks_of_several_tokens():
    async with scene_of(engine_args={"stream_interval": "3"}) as scene:
        requests = [request_for(prompt(5 + salt, salt), max_tokens=3 + salt % 9) for salt in range(32)]
        alone = [await aggregated(scene["both"].host, request) for request in requests]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(pulled(scene["p"].host, scene["d"].host, request)) for request in requests]
        assert [task.result() for task in running] == alone
        await scene.until_empty()


async def test_sampled_requests_draw_by_their_seed():
    async with scene_of() as scene:
        outputs = []
        for seed in (1, 1, -1):
            sampling = Sampling(seed=seed, temperature=0.8, top_p=0.9)
            request = request_for(prompt(12), max_tokens=12, sampling=sampling)
            outputs.append(await pulled(scene["p"].host, scene["d"].host, request))
        assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("switches", [{}, {"is_older": True}, {"fills_first_logprobs": False}])
@pytest.mark.parametrize("num_logprobs", [0, 3])
async def test_every_token_has_its_logprobs(num_logprobs, switches):
    async with scene_of(**switches) as scene:
        request = request_for(prompt(10), max_tokens=5, num_logprobs=num_logprobs)
        ids = await pulled(scene["p"].host, scene["d"].host, request)
        await aggregated(scene["both"].host, request)
        mine, theirs = (
            [row for event in events if isinstance(event, Tokens) for row in event.logprobs or ()]
            for events in (scene["d"].host.events[request.attempt_id], *scene["both"].host.events.values())
        )
        assert mine == theirs
        assert len(mine) == len(ids)
        assert all(len(row.top) == num_logprobs for row in mine)
        assert num_logprobs == 0 or [row.top[0][0] for row in mine] == ids


@pytest.mark.parametrize("fills_first_logprobs", [True, False])
async def test_logprobs_may_come_as_bare_numbers(fills_first_logprobs):
    """With no top ones among them: who asks for those is told, and the engines go on."""
    async with scene_of(has_bare_logprobs=True, fills_first_logprobs=fills_first_logprobs) as scene:
        request = request_for(prompt(10), max_tokens=5, num_logprobs=0)
        assert len(await pulled(scene["p"].host, scene["d"].host, request)) == 5
        await aggregated(scene["both"].host, request)
        mine, theirs = (
            [row for event in events if isinstance(event, Tokens) for row in event.logprobs or ()]
            for events in (scene["d"].host.events[request.attempt_id], *scene["both"].host.events.values())
        )
        assert mine == theirs
        assert all(row.logprob <= 0.0 and not row.top for row in mine)
        assert len({row.logprob for row in mine}) == 5
        wanting = request_for(prompt(10), max_tokens=5, num_logprobs=2)
        done = await handed_over(scene["p"], wanting)
        scene["d"].engine.decode(decode_leg(wanting, done.params))
        end = await scene["d"].host.ended(wanting.attempt_id)
        assert isinstance(end, Failed)
        assert "no top ones" in end.error.message
        await scene.until_empty()
        assert not any(scene[name].run.done() for name in ("p", "d"))


async def test_an_end_id_that_the_engine_keeps_to_itself_costs_no_completion_with_logprobs():
    async with scene_of(eos_one_in=4, is_older=True) as scene:
        for salt in range(8):
            request = request_for(prompt(9, salt), max_tokens=40, num_logprobs=1)
            scene["p"].engine.prefill(prefill_leg(request))
            result = await scene["p"].host.result(request.attempt_id)
            if isinstance(result, PrefillEnded):
                assert (result.token_id, result.logprobs) == (EOS, TokenLogprobs(UNKNOWN_LOGPROB))
                continue
            scene["d"].engine.decode(decode_leg(request, result.params))
            ids = await scene["d"].host.output(request.attempt_id)
            events = scene["d"].host.events[request.attempt_id]
            rows = [row for event in events if isinstance(event, Tokens) for row in event.logprobs or ()]
            assert len(rows) == len(ids)
            assert (ids[-1], rows[-1]) == (EOS, TokenLogprobs(UNKNOWN_LOGPROB))
            assert all(row.logprob > -1000 for row in rows[:-1])


# ---- the end ----


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_eos_as_first_token_ends_the_request_in_prefill_and_frees_its_kv(max_tokens, is_older):
    async with scene_of(first_token=EOS, is_older=is_older) as scene:
        request = request_for(prompt(10), max_tokens=max_tokens)
        scene["p"].engine.prefill(prefill_leg(request))
        result = await scene["p"].host.result(request.attempt_id)
        assert isinstance(result, PrefillEnded)
        assert (result.token_id, result.reason) == (EOS, "stop")
        assert scene["p"].executor.num_used_blocks() == 0
        await scene.until_empty()


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("first_token", [OTHER_EOS, 300])
async def test_a_stop_id_as_first_token_is_ended_by_decode_since_only_a_fetch_frees_the_armed_kv(first_token, is_older):
    async with scene_of(first_token=first_token, is_older=is_older) as scene:
        stop = StopConditions(max_tokens=5, stop_token_ids=(300,))
        request = request_for(prompt(10), stop=stop)
        assert await pulled(scene["p"].host, scene["d"].host, request) == [first_token]
        end = await scene["d"].host.ended(request.attempt_id)
        assert isinstance(end, Finished)
        assert (end.reason, end.usage.completion_tokens) == ("stop", 1)
        await scene.until_empty()


async def test_ignored_eos_as_first_token_is_handed_over():
    async with scene_of(first_token=EOS) as scene:
        request = request_for(prompt(10), stop=StopConditions(max_tokens=4, ignore_eos=True))
        ids = await pulled(scene["p"].host, scene["d"].host, request)
        assert (len(ids), ids[0]) == (4, EOS)
        assert ids == await aggregated(scene["both"].host, request)


async def test_min_tokens_hold_across_both_phases():
    one_eos = msgspec.structs.replace(CARD, eos_token_ids=(EOS,))
    async with scene_of(eos_one_in=2, card=one_eos) as scene:
        stop = StopConditions(max_tokens=20, min_tokens=6)
        lengths = []
        for salt in range(5):
            request = request_for(prompt(10, salt), stop=stop)
            ids = await pulled(scene["p"].host, scene["d"].host, request)
            assert EOS not in ids[:6]
            lengths.append(len(ids))
        assert 7 <= min(lengths) < 20


@pytest.mark.parametrize("is_older", [False, True])
async def test_a_drawn_eos_or_stop_id_is_delivered_as_the_last_id(is_older):
    async with scene_of(eos_one_in=4, is_older=is_older) as scene:
        reasons = []
        for salt in range(12):
            request = request_for(prompt(9, salt), max_tokens=6)
            ids = await pulled(scene["p"].host, scene["d"].host, request)
            assert ids == await aggregated(scene["both"].host, request)
            reasons.append("stop" if ids[-1] == EOS else "length")
            assert EOS not in ids[:-1]
        assert {*reasons} == {"stop", "length"}
        stop = StopConditions(max_tokens=50, stop_token_ids=(ids[1],))
        assert await pulled(scene["p"].host, scene["d"].host, request_for(prompt(9, 11), stop=stop)) == ids[:2]
        await scene.until_empty()


async def test_a_context_phase_may_call_itself_not_finished():
    async with scene_of(ends_context_as="not_finished") as scene:
        request = request_for(prompt(10), max_tokens=4)
        assert len(await pulled(scene["p"].host, scene["d"].host, request)) == 4
        await scene.until_empty()


@pytest.mark.parametrize("switches", [{"responses_per_context": 2}, {"ends_context_as": "timeout"}])
async def test_a_context_phase_that_doesnt_answer_once_and_well_fails_the_leg(switches):
    async with scene_of(**switches) as scene:
        request = request_for(prompt(10), max_tokens=4)
        scene["p"].engine.prefill(prefill_leg(request))
        result = await scene["p"].host.result(request.attempt_id)
        assert isinstance(result, PrefillFailed)
        assert ("exactly one response" in result.error.message) == ("responses_per_context" in switches)


async def test_a_failure_names_the_tokens_that_were_delivered_and_no_more():
    async with scene_of(times_out_at=4) as scene:
        both, request = scene["both"], request_for(prompt(10), max_tokens=8)
        both.engine.decode(decode_leg(request, None))
        end = await both.host.ended(request.attempt_id)
        assert isinstance(end, Failed)
        delivered = [
            one
            for event in both.host.events[request.attempt_id]
            if isinstance(event, Tokens)
            for one in event.token_ids
        ]
        assert (end.error.code, end.seq) == ("deadline_exceeded", len(delivered))
        await scene.until_empty()


# ---- aborts ----


@pytest.mark.parametrize("error", [None, AbortedError("enough").record()])
async def test_an_abort_during_the_context_phase_leaves_nothing(error):
    async with scene_of() as scene:
        p, request = scene["p"], request_for(prompt(20), max_tokens=4)
        with p.paused("context"):
            p.engine.prefill(prefill_leg(request))
            assert p.engine.load().queued_prefill_tokens == 20
            p.engine.abort(request.attempt_id, error)
            p.engine.abort(request.attempt_id, error)
            load = p.engine.load()
            assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 0, 0)
        await scene.until_empty()
        events = p.host.events.get(request.attempt_id, [])
        assert events == ([] if error is None else [PrefillFailed(attempt_id=request.attempt_id, error=error)])


async def test_prefill_hears_that_its_kv_was_fetched_and_holds_it_no_longer():
    async with scene_of() as scene:
        request = request_for(prompt(20), max_tokens=4)
        done = await handed_over(scene["p"], request)
        assert scene["p"].engine.load().num_held == 1
        scene["d"].engine.decode(decode_leg(request, done.params))
        await scene["d"].host.output(request.attempt_id)
        await scene.until_empty()
        assert scene.link.count(ConfirmRequest) == 1


async def test_kv_that_nobody_fetches_is_held_until_the_engines_timeout():
    async with scene_of(engine_args=SOON | {"enable_iter_perf_stats": "false"}) as scene:
        p, request = scene["p"], request_for(prompt(20), max_tokens=4)
        await handed_over(p, request)
        p.engine.abort(request.attempt_id)
        load = p.engine.load()
        assert (load.num_held, load.kv_blocks_used, load.running) == (1, 5, 0)
        await scene.until_empty()


@pytest.mark.parametrize("error", [None, AbortedError("enough").record()])
async def test_an_abort_during_the_transfer_waits_for_it_and_leaves_nothing(error):
    async with scene_of() as scene:
        d, request = scene["d"], request_for(prompt(20), max_tokens=300)
        done = await handed_over(scene["p"], request)
        with d.paused("transfer"):
            d.engine.decode(decode_leg(request, done.params))
            d.engine.abort(request.attempt_id, error)
            load = d.engine.load()
            assert (load.running, load.waiting, load.num_held) == (0, 0, 1)
        await scene.until_empty()
        assert d.executor.num_transfers == 1
        assert d.executor.submitted[-1].is_cancelled
        events = d.host.events.get(request.attempt_id, [])
        assert events == ([] if error is None else [Failed(request.attempt_id, 0, error)])


@pytest.mark.parametrize("is_remote", [True, False])
async def test_an_abort_in_mid_stream_leaves_nothing(is_remote):
    async with scene_of() as scene:
        request = request_for(prompt(20), max_tokens=300)
        seat = scene["d" if is_remote else "both"]
        params = (await handed_over(scene["p"], request)).params if is_remote else None
        seat.engine.decode(decode_leg(request, params))
        await seat.host.until(lambda: len(seat.host.events.get(request.attempt_id, [])) > 2)
        seat.engine.abort(request.attempt_id)
        num_events = len(seat.host.events[request.attempt_id])
        await scene.until_empty()
        assert len(seat.host.events[request.attempt_id]) <= num_events + 1
        assert not isinstance(seat.host.events[request.attempt_id][-1], Finished | Failed)


async def test_fifty_aborts_at_any_time_leave_nothing():
    async with scene_of(engine_args=SOON) as scene:
        for number in range(50):
            p, d, request = scene["p"], scene["d"], request_for(prompt(9, number), max_tokens=30)
            p.engine.prefill(prefill_leg(request))
            for _ in range(number % 5):
                await asyncio.sleep(0.001)
            result = next((one for one in p.host.events.get(request.attempt_id, [])), None)
            if isinstance(result, PrefillDone):
                d.engine.decode(decode_leg(request, result.params))
                await asyncio.sleep(0.001 * (number % 3))
            for seat in (p, d):
                seat.engine.abort(request.attempt_id)
        await scene.until_empty()


# ---- handoffs that can't be used ----


async def test_a_decode_refusal_is_told_at_once_and_the_kv_times_out():
    async with scene_of(engine_args=SOON) as scene:
        request = request_for(prompt(20), max_tokens=4)
        done = await handed_over(scene["p"], request)
        for params, changes in (
            (done.params, {"stop": StopConditions(max_tokens=999)}),
            (
                done.params,
                {"sampling": Sampling(seed=1, is_user_seeded=True), "token_ids": prompt(19), "resume": (300,)},
            ),
            (_ticket(), {}),
            (TrtllmDisaggregatedParams(disaggregated_params=msgspec.Raw(b'{"opaque_state": 7}')), {}),
            (TrtllmDisaggregatedParams(disaggregated_params=msgspec.Raw(b"{}")), {}),
        ):
            with pytest.raises(RequestError):
                scene["d"].engine.decode(decode_leg(msgspec.structs.replace(request, **changes), params))
        longer = msgspec.structs.replace(request, token_ids=prompt(21))
        with pytest.raises(KvMismatchError, match="20 tokens, the request has 21"):
            scene["d"].engine.decode(decode_leg(longer, done.params))
        await scene.until_empty()


async def test_a_handoff_is_used_once():
    async with scene_of() as scene:
        request = request_for(prompt(20), max_tokens=4)
        done = await handed_over(scene["p"], request)
        scene["d"].engine.decode(decode_leg(request, done.params))
        assert len(await scene["d"].host.output(request.attempt_id)) == 4
        again = msgspec.structs.replace(request, attempt_id=new_attempt_id())
        with pytest.raises(RequestError, match="used already"):
            scene["d"].engine.decode(decode_leg(again, done.params))
        scene["both"].engine.decode(decode_leg(again, done.params))  # another engine: its transceiver says so
        end = await scene["both"].host.ended(again.attempt_id)
        assert isinstance(end, Failed)
        assert (end.error.code, end.error.phase) == ("kv_transfer_failed", "transfer")
        await scene.until_empty()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_kv_that_timed_out_is_recomputed_or_fails_as_configured(policy):
    async with scene_of(kv_load_failure=policy, engine_args=SOON) as scene:
        d, request = scene["d"], request_for(prompt(20), max_tokens=6)
        done = await handed_over(scene["p"], request)
        await scene.until_empty()
        d.engine.decode(decode_leg(request, done.params))
        end = await d.host.ended(request.attempt_id)
        if policy == "fail":
            assert isinstance(end, Failed)
        else:
            assert await d.host.output(request.attempt_id) == await aggregated(scene["both"].host, request)
            assert isinstance(end, Finished)
            assert end.usage.num_computed_prompt_tokens == 20
            assert d.engine.load().num_recomputed_tokens == 20
        await scene.until_empty()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_the_death_of_the_context_engine_reaches_its_waiting_decode_leg_at_once(policy):
    async with scene_of(kv_load_failure=policy) as scene:
        p, d, request = scene["p"], scene["d"], request_for(prompt(20), max_tokens=6)
        other = request_for(prompt(5), max_tokens=3)
        done = await handed_over(p, request)
        with d.paused("transfer"):
            d.engine.decode(decode_leg(request, done.params))
            p.llm.shutdown()
            d.engine.peer_left(p.host.worker, Epoch(1))
            assert d.engine.load().running == 1
            d.engine.peer_left(p.host.worker, p.host.epoch)
            end = await d.host.ended(request.attempt_id)
            d.engine.decode(decode_leg(other))
            await d.host.output(other.attempt_id)
        if policy == "fail":
            assert isinstance(end, Failed)
            assert end.error == WorkerLostError(end.error.message, phase="transfer").record()
        else:
            assert await d.host.output(request.attempt_id) == await aggregated(scene["both"].host, request)
        await d.until_empty()


# ---- errors ----


async def test_an_engine_error_of_one_request_is_that_requests():
    async with scene_of() as scene:
        d, request = scene["d"], request_for(prompt(20), max_tokens=4)
        lost = TrtllmDisaggregatedParams(
            disaggregated_params=msgspec.Raw(b'{"ctx_request_id":5,"opaque_state":"AA=="}')
        )
        d.engine.decode(decode_leg(request, lost))
        assert isinstance(await d.host.ended(request.attempt_id), Failed)
        after = request_for(prompt(20), max_tokens=4)
        d.engine.decode(decode_leg(after))
        assert len(await d.host.output(after.attempt_id)) == 4
        assert not d.run.done()


async def test_an_output_that_cant_be_read_costs_its_request_alone(monkeypatch):
    async with scene_of() as scene:
        p, request = scene["p"], request_for(prompt(20), max_tokens=4)
        with monkeypatch.context() as garbled:
            garbled.setattr(
                RequestOutput, "cached_tokens", property(lambda self: None, lambda self, value: None), False
            )
            p.engine.prefill(prefill_leg(request))
            result = await p.host.result(request.attempt_id)
        assert isinstance(result, PrefillFailed)
        assert "can't be read" in result.error.message
        assert len(await pulled(p.host, scene["d"].host, request_for(prompt(9), max_tokens=3))) == 3
        assert not p.run.done()


async def test_a_fault_in_telling_prefill_that_its_kv_was_fetched_ends_nothing(caplog):
    async def fails(worker, message):
        if isinstance(message, ConfirmRequest):
            raise ValueError("a fault of ours")
        return 1

    async with scene_of() as scene:
        p, d, request = scene["p"], scene["d"], request_for(prompt(20), max_tokens=4)
        scene.link.meddle = fails
        assert len(await pulled(p.host, d.host, request)) == 4
        await d.host.until(lambda: "a fault of ours" in caplog.text)
        scene.link.meddle = None
        assert len(await pulled(p.host, d.host, request_for(prompt(9), max_tokens=3))) == 3
        assert not d.run.done()


async def test_any_other_error_while_iterating_ends_the_engine():
    scene = Scene()
    async with seated(scene, "both") as seat:
        with seat.paused("context"):
            seat.engine.decode(decode_leg(request_for(prompt(20))))
            seat.executor.crash(RuntimeError("CUDA error"))
            await asyncio.wait([seat.run], timeout=5)
        with pytest.raises(RuntimeError, match="CUDA error"):
            seat.run.result()


async def test_an_engine_that_takes_no_more_requests_ends():
    scene = Scene()
    async with seated(scene, "both") as seat:
        seat.llm.shutdown()
        with pytest.raises(EngineError, match="shutting down"):
            seat.engine.decode(decode_leg(request_for(prompt(20))))
        await asyncio.wait([seat.run], timeout=5)
        with pytest.raises(EngineError, match="shut down"):
            seat.run.result()


async def test_what_the_engine_refuses_at_once_is_the_requests_error():
    async with scene_of(engine_args={"max_num_tokens": "16"}) as scene:
        request = request_for(prompt(20), max_tokens=4)
        with pytest.raises(RequestError, match="max_num_tokens"):
            scene["p"].engine.prefill(prefill_leg(request))
        with pytest.raises(RequestError, match="context of 400"):
            scene["d"].engine.decode(decode_leg(request_for(prompt(20), max_tokens=400)))
        await scene.until_empty()


async def test_peers_may_only_confirm():
    async with scene_of() as scene:
        with pytest.raises(RequestError):
            await scene["p"].engine.answer(LeaseRequest(attempt_id=new_attempt_id(), epoch=Epoch(1), lease_s=1.0))


# ---- resumed requests ----


async def test_a_resumed_completion_goes_on_where_it_was():
    async with scene_of() as scene:
        request = request_for(prompt(20), max_tokens=9)
        whole = await aggregated(scene["both"].host, request)
        for cut in (1, 5, 8):
            resumed = request_for(prompt(20), max_tokens=9, resume=tuple(whole[:cut]))
            rest = []
            if cut == 8:
                scene["p"].engine.prefill(prefill_leg(resumed))
                result = await scene["p"].host.result(resumed.attempt_id)
                assert isinstance(result, PrefillEnded)
                rest = [result.token_id]
            else:
                done = await handed_over(scene["p"], resumed)
                scene["d"].engine.decode(decode_leg(resumed, done.params))
                end = await scene["d"].host.ended(resumed.attempt_id)
                assert isinstance(end, Finished)
                assert (end.seq, end.usage.completion_tokens, end.usage.prompt_tokens) == (9, 9, 20)
                events = scene["d"].host.events[resumed.attempt_id]
                tokens = [event for event in events if isinstance(event, Tokens)]
                assert tokens[0].seq == cut
                rest = [token_id for event in tokens for token_id in event.token_ids]
            assert whole[:cut] + rest == whole
        await scene.until_empty()


async def test_a_completion_that_had_ended_ends_again_without_the_engine():
    async with scene_of() as scene:
        resumed = request_for(prompt(20), max_tokens=9, resume=(300, EOS))
        scene["p"].engine.prefill(prefill_leg(resumed))
        result = await scene["p"].host.result(resumed.attempt_id)
        assert isinstance(result, PrefillEnded)
        assert (result.token_id, result.reason, result.is_delivered) == (EOS, "stop", True)
        scene["d"].engine.decode(decode_leg(resumed))
        end = await scene["d"].host.ended(resumed.attempt_id)
        assert isinstance(end, Finished)
        assert (end.seq, end.reason) == (2, "stop")


def _ticket() -> KvTicket:
    return KvTicket(
        attempt_id=new_attempt_id(),
        prefill_worker=WorkerId("p"),
        epoch=Epoch(1),
        block_ids=(1,),
        num_tokens=3,
        layout="x",
        lease_s=1.0,
        first_token_id=5,
    )
