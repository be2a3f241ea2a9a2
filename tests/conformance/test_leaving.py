"""Requests that end early, in each phase: both sides hold nothing soon after, and the pair serves on."""

import asyncio

import msgspec
import pytest

from schemas.errors import BuswayError
from schemas.frames import Failed
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt


async def serves(desk: Desk) -> None:
    request = desk.request(prompt(45, salt=99), 4)
    assert (await desk.disaggregated(request)).ids == (await desk.aggregated(request)).ids


async def test_an_abort_while_prefill_computes(desk: Desk) -> None:
    request = desk.request(prompt(700, salt=31), 4)
    await desk.ask_prefill(request)
    await desk.abort(desk.pair.prefill.id, request.attempt_id)
    await desk.until_free(desk.pair.case.free_s)
    await serves(desk)


async def test_an_abort_when_the_kv_is_ready_and_not_fetched(desk: Desk) -> None:
    request = desk.request(prompt(100, salt=32), 4)
    await desk.params(request)
    await desk.abort(desk.pair.prefill.id, request.attempt_id)
    await desk.until_free(desk.pair.case.free_s)
    await serves(desk)


async def test_an_abort_while_decode_waits_for_the_kv(desk: Desk) -> None:
    request = desk.request(prompt(100, salt=33), 4)
    params = await desk.params(request)
    await desk.ask_decode(request, params)
    await desk.abort(desk.pair.decode.id, request.attempt_id)
    await desk.abort(desk.pair.prefill.id, request.attempt_id)
    await desk.until_free(desk.pair.case.free_s)
    await serves(desk)


async def test_an_abort_in_mid_stream(desk: Desk) -> None:
    request = desk.request(prompt(60, salt=34), 400)
    params = await desk.params(request)
    await desk.ask_decode(request, params)
    await desk.until(lambda: desk.num_tokens(request.attempt_id) >= 3)
    await desk.abort(desk.pair.decode.id, request.attempt_id)
    await desk.until_free(desk.pair.case.free_s)
    assert desk.num_tokens(request.attempt_id) < 400
    await serves(desk)


async def test_forty_aborts_at_random_moments_leave_nothing(desk: Desk) -> None:
    async def one(number: int) -> None:
        request = desk.request(prompt(20 + 9 * number, salt=200 + number), 50)
        await desk.ask_prefill(request)
        await asyncio.sleep(0.002 * (number % 20))
        for worker in (desk.pair.prefill, desk.pair.decode):
            await desk.abort(worker.id, request.attempt_id)

    async with asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(one(number))
    await desk.until_free(desk.pair.case.free_s)
    await serves(desk)


async def test_a_decode_that_refuses_lets_prefill_free_at_once(desk: Desk) -> None:
    request = desk.request(prompt(100, salt=35), 4)
    params = await desk.params(request)
    too_long = msgspec.structs.replace(request, stop=msgspec.structs.replace(request.stop, max_tokens=1_000_000))
    with pytest.raises(BuswayError, match="1000000"):
        await desk.ask_decode(too_long, params)
    await desk.abort(desk.pair.prefill.id, request.attempt_id)  # as the router does on a refusal
    await desk.until_free(desk.pair.case.free_s)
    await serves(desk)


async def test_a_lease_that_ran_out_never_becomes_text(desk: Desk) -> None:
    """Nobody renews it here; meanwhile prefill's blocks are free to be overwritten."""
    if desk.pair.case.handoff != "pull":
        pytest.skip("a rendezvous has no lease")
    request = desk.request(prompt(100, salt=36), 6)
    params = await desk.params(request)
    await desk.until_free(20.0)
    before = await desk.load(desk.pair.decode.id)
    got = await desk.decode(request, params)
    after = await desk.load(desk.pair.decode.id)
    assert after.num_remote_prefills == before.num_remote_prefills
    if not isinstance(got.end, Failed):
        assert got.ids == (await desk.aggregated(request)).ids
        assert after.num_recomputed_tokens > before.num_recomputed_tokens
