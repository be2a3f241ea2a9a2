"""What an external engine's load reports say of its prefill passes."""

import asyncio
import time

from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = only("vllm", "sglang")


async def test_the_load_says_how_long_its_prefill_passes_take(desk: Desk) -> None:
    """Routers estimate by it."""
    before = (await desk.load(desk.pair.prefill.id)).prefill_cost
    num_before = before.num_passes if before is not None else 0
    for number, length in enumerate((40, 400, 800)):
        await desk.disaggregated(desk.request(prompt(length, salt=95 + number), 2))
        await desk.until_free(20.0)
    end = time.monotonic() + 10.0
    while (cost := (await desk.load(desk.pair.prefill.id)).prefill_cost) is None or cost.num_passes < num_before + 3:
        assert time.monotonic() < end, cost
        await asyncio.sleep(0.05)
    assert 0.0 < cost.base_s + 800 * (cost.token_s + 800 * cost.token2_s) < 60.0
