"""What comes out: a disaggregated completion is the aggregated one, token for token, counted once."""

import asyncio

import msgspec
import pytest

from schemas.errors import RequestError
from schemas.frames import Begun, Finished
from schemas.hop import PrefillEnded
from schemas.ids import new_attempt_id
from schemas.request import Sampling
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt
from tests.conformance.tiny_model import ENDING_PROMPT


async def test_greedy_ids_equal_the_aggregated_ones_at_every_block_boundary(desk: Desk) -> None:
    block = desk.pair.case.block_size
    for length in (1, block - 1, block, block + 1, 2 * block, 5 * block + 3):
        request = desk.request(prompt(length, salt=length), 12)
        got, alone = await desk.disaggregated(request), await desk.aggregated(request)
        assert got.ids == alone.ids, f"{length} tokens"
        assert got.finished.reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_the_first_token_is_counted_once(desk: Desk, max_tokens: int) -> None:
    request = desk.request(prompt(40, salt=max_tokens), max_tokens)
    got, alone = await desk.disaggregated(request), await desk.aggregated(request)
    assert got.ids == alone.ids
    assert len(got.ids) == max_tokens
    if isinstance(got.end, PrefillEnded):
        assert max_tokens == 1
        assert got.end.reason == "length"
    else:
        assert got.finished.usage.completion_tokens == max_tokens
        assert got.finished.usage.prompt_tokens == 40


async def test_the_prompts_hit_is_told_with_the_first_token(desk: Desk) -> None:
    """Whoever goes on with the completion elsewhere can't know it any more."""
    ids = prompt(100, salt=5)
    await desk.disaggregated(desk.request(ids, 4))
    request = desk.request(ids, 4)
    got = await desk.disaggregated(request)
    (begun,) = [frame for frame in desk.frames(request.attempt_id) if isinstance(frame, Begun)]
    assert begun.cached_tokens == got.finished.usage.cached_tokens


async def test_a_request_may_ask_for_all_that_the_context_holds(desk: Desk) -> None:
    """As one that says no max_tokens does."""
    ids = prompt(50, salt=4)
    alone = (await desk.aggregated(desk.request(ids, 8))).ids
    stop = next(token for token in alone[1:] if token != alone[0])
    rest = (await desk.record(desk.pair.decode)).longest_sequence_tokens - len(ids)
    got = await desk.disaggregated(desk.request(ids, rest, stop_token_ids=(stop,)))
    assert got.ids == alone[: alone.index(stop) + 1]
    assert got.finished.reason == "stop"


async def test_a_stop_id_drawn_in_prefill_ends_the_request_and_frees_its_kv(desk: Desk) -> None:
    ids = prompt(50, salt=3)
    first = (await desk.aggregated(desk.request(ids, 1))).ids[0]
    got = await desk.disaggregated(desk.request(ids, 8, stop_token_ids=(first,)))
    assert got.ids == [first]
    assert isinstance(got.end, Finished | PrefillEnded)
    assert got.end.reason == "stop"
    await desk.until_free(3.0)


async def test_an_eos_drawn_in_prefill_ends_the_request_and_frees_its_kv(desk: Desk) -> None:
    if desk.pair.case.model != "tiny":
        pytest.skip("the sim model's EOS is a setting: tests/engines/sim, tests/engines/trtllm")
    request = desk.request(ENDING_PROMPT, 8)
    ignored = await desk.disaggregated(request)
    assert len(ignored.ids) == 8
    heeded = msgspec.structs.replace(
        request, attempt_id=new_attempt_id(), stop=msgspec.structs.replace(request.stop, ignore_eos=False)
    )
    got, alone = await desk.disaggregated(heeded), await desk.aggregated(heeded)
    assert got.ids == alone.ids == ignored.ids[:1]
    for outcome in (got, alone):
        assert isinstance(outcome.end, Finished | PrefillEnded)
        assert outcome.end.reason == "stop"
    assert isinstance(got.end, PrefillEnded) == (desk.pair.case.handoff == "pull")
    await desk.until_free(3.0)


async def test_a_stop_id_is_not_drawn_before_min_tokens_on_either_leg(desk: Desk) -> None:
    ids = prompt(50, salt=3)
    first = (await desk.aggregated(desk.request(ids, 1))).ids[0]
    request = desk.request(ids, 6, stop_token_ids=(first,), min_tokens=3)
    if "min_tokens" in desk.pair.case.refuses:
        with pytest.raises(RequestError, match="min_tokens"):
            await desk.disaggregated(request)
        return
    got, alone = await desk.disaggregated(request), await desk.aggregated(request)
    assert got.ids == alone.ids
    assert first not in got.ids[:3]
    assert len(got.ids) >= 3


async def test_logprobs_come_for_every_token_and_are_the_aggregated_ones(desk: Desk) -> None:
    for max_tokens in (1, 5):
        request = desk.request(prompt(37, salt=11), max_tokens, num_logprobs=2)
        got, alone = await desk.disaggregated(request), await desk.aggregated(request)
        assert len(got.logprobs) == len(alone.logprobs) == max_tokens
        for (one, top), (other, other_top) in zip(got.logprobs, alone.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
            assert one <= 0.0
            assert [token for token, _ in top] == [token for token, _ in other_top]
            assert len(top) == 2


async def test_a_seeded_completion_is_the_aggregated_one(desk: Desk) -> None:
    sampling = Sampling(seed=42, temperature=0.8, top_p=0.9, top_k=50, is_user_seeded=True)
    request = desk.request(prompt(33, salt=4), 10, sampling=sampling)
    got, alone = await desk.disaggregated(request), await desk.aggregated(request)
    assert got.ids == alone.ids


async def test_thirty_two_at_once_give_their_own_completions(desk: Desk) -> None:
    requests = [desk.request(prompt(8 + 5 * number, salt=100 + number), 3 + number % 5) for number in range(32)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(desk.disaggregated(request)) for request in requests]
    for request, task in zip(requests, running, strict=True):
        assert task.result().ids == (await desk.aggregated(request)).ids
