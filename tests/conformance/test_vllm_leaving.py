"""vLLM: what an abort spares, as its own counters and leases show it."""

import asyncio

import msgspec

from schemas.handoff import VllmKvTransferParams
from schemas.ids import WorkerId
from schemas.peer import LeaseRequest, Verdict
from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt
from tests.conformance.test_vllm_metrics import SOURCE, scrape

pytestmark = only("vllm")

STRANGER = WorkerId("slow-stranger")


async def test_prompts_that_were_aborted_are_not_computed(desk: Desk) -> None:
    """Ten long ones at once: but for what the step under way had of them."""
    length, count = 900, 10
    before = (await scrape(desk, desk.pair.prefill)).get((SOURCE, "local_compute"), 0.0)
    requests = [desk.request(prompt(length, salt=900 + number), 4) for number in range(count)]
    for request in requests:
        await desk.ask_prefill(request)
    for request in requests:
        await desk.abort(desk.pair.prefill.id, request.attempt_id)
    await desk.disaggregated(desk.request(prompt(30, salt=919), 2))  # behind them
    await desk.until_free(60.0)
    computed = (await scrape(desk, desk.pair.prefill))[SOURCE, "local_compute"] - before
    assert computed <= count * length / 2


async def test_a_decode_aborted_before_its_fetch_gives_the_kv_back_within_the_lease(desk: Desk) -> None:
    """Nobody tells prefill here but the two engines, which have met before: at their first contact vLLM's handshake
    comes too late for it, and the lease has to end."""
    was_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slowly(message: LeaseRequest, call: object) -> Verdict:
        was_asked.set()
        await may_answer.wait()
        return Verdict(is_good=True)

    await desk.bus.serve(desk.bus.subjects.peer(STRANGER, "lease"), LeaseRequest, slowly)
    await desk.disaggregated(desk.request(prompt(40, salt=921), 3))
    request = desk.request(prompt(100, salt=920), 4)
    params = await desk.params(request)
    assert isinstance(params, VllmKvTransferParams)
    await desk.ask_decode(request, msgspec.structs.replace(params, prefill_worker=STRANGER))
    await was_asked.wait()
    await desk.abort(desk.pair.decode.id, request.attempt_id)
    may_answer.set()
    await desk.until_free(desk.pair.case.free_s)
