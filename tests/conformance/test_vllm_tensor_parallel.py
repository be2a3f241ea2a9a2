"""vLLM with other tensor parallelism on each side: each rank of decode fetches its heads' part of the KV."""

import msgspec
import pytest

from services.worker.peers import is_pair
from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = [only("vllm-tp"), pytest.mark.slow, pytest.mark.timeout(900)]


async def test_prefill_with_one_rank_and_decode_with_two_give_the_aggregated_completion(desk: Desk) -> None:
    """Lengths around a block; and the KV is what counts, not the ids that decode is given."""
    prefill, decode = [await desk.record(worker) for worker in (desk.pair.prefill, desk.pair.decode)]
    assert (prefill.tp_size, decode.tp_size) == (1, 2)
    assert is_pair(prefill, decode)
    for length in (31, 33, 100):
        request = desk.request(prompt(length, salt=80 + length), 8)
        got, alone = await desk.disaggregated(request), await desk.aggregated(request)
        assert got.ids == alone.ids, f"{length} tokens"
        assert got.finished.usage.num_computed_prompt_tokens == 0
        assert got.finished.timings.kv_bytes > 0
    real = prompt(70, salt=81)
    wrong = (*prompt(69, salt=82), real[-1])
    request = desk.request(real, 8)
    expected = (await desk.aggregated(request)).ids
    got = await desk.decode(msgspec.structs.replace(request, token_ids=wrong), await desk.params(request))
    assert got.ids == expected
