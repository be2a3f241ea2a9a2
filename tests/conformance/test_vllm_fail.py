"""vLLM with kv_load_failure "fail": KV that can't be used ends the request by name, and nothing is computed instead."""

import msgspec
import pytest

from schemas.errors import LeaseExpiredError
from schemas.frames import Failed
from tests.conformance.engines import only
from tests.conformance.pair import Desk, Outcome
from tests.conformance.prompts import prompt
from tests.conformance.test_vllm_unvouched import kv_of_another, vouch

pytestmark = only("vllm-fail")


async def failed(desk: Desk, outcome: Outcome, computed_before: int) -> Failed:
    assert isinstance(outcome.end, Failed), outcome
    assert outcome.ids == []
    assert (await desk.load(desk.pair.decode.id)).num_recomputed_tokens == computed_before
    return outcome.end


@pytest.mark.parametrize("is_fetched", [True, False])
async def test_kv_that_nobody_vouches_for_ends_the_request(desk: Desk, is_fetched: bool) -> None:
    await vouch(desk, before=is_fetched, after=False)
    mine, _, params = await kv_of_another(desk, 61 + is_fetched * 2)
    computed = (await desk.load(desk.pair.decode.id)).num_recomputed_tokens
    end = await failed(desk, await desk.decode(desk.request(mine, 6), params), computed)
    assert end.error.code == LeaseExpiredError.code


async def test_kv_that_vllm_cant_load_ends_the_request(desk: Desk) -> None:
    """vLLM's own policy, which prefill's word doesn't reach: its params lead nowhere."""
    await vouch(desk, before=True, after=True)
    mine, _, params = await kv_of_another(desk, 65)
    fields = msgspec.json.decode(params.kv_transfer_params) | {"remote_port": 9, "remote_engine_id": "nobody"}
    astray = msgspec.structs.replace(params, kv_transfer_params=msgspec.Raw(msgspec.json.encode(fields)))
    computed = (await desk.load(desk.pair.decode.id)).num_recomputed_tokens
    end = await failed(desk, await desk.decode(desk.request(mine, 6), astray), computed)
    assert "could not load the KV" in end.error.message
    own = await desk.aggregated(desk.request(prompt(45, salt=67), 4))
    assert len(own.ids) == 4
