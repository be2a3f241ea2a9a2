"""SGLang with two ranks on each side: each rank of prefill sends its heads' part of the KV to its like."""

import pytest

from services.worker.peers import is_pair
from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = [only("sglang-tp"), pytest.mark.slow, pytest.mark.timeout(900)]


async def test_two_ranks_on_each_side_give_the_aggregated_completion(desk: Desk) -> None:
    """Lengths around a block."""
    prefill, decode = [await desk.record(worker) for worker in (desk.pair.prefill, desk.pair.decode)]
    assert (prefill.tp_size, decode.tp_size) == (2, 2)
    assert is_pair(prefill, decode)
    for length in (15, 16, 17, 300):
        request = desk.request(prompt(length, salt=360 + length), 8)
        got, alone = await desk.disaggregated(request), await desk.aggregated(request)
        assert got.ids == alone.ids, f"{length} tokens"
        assert got.finished.usage.num_computed_prompt_tokens == 0
        assert got.finished.timings.kv_bytes > 0
