"""Pull: the disaggregated answer is the aggregated one, and the KV really is what it comes from."""

import pytest

from tests.engines.paged.fleet import aggregated, fleet_of, met, prompt, pulled, request_for

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("handoff", [pulled, met])
@pytest.mark.parametrize("block_size", [1, 16, 256])
async def test_output_equals_the_aggregated_output_at_block_borders(handoff, block_size):
    b = block_size
    async with fleet_of("alone", "p", "d", block_size=str(b), num_blocks=str(max(64, 2048 // b))) as fleet:
        for length in sorted({1, max(1, b - 1), b, b + 1, 2 * b}):
            for _ in range(3):
                request = request_for(prompt(length), max_tokens=40)
                want = await aggregated(fleet["alone"], request)
                assert await handoff(fleet["p"], fleet["d"], request) == want
        assert fleet["d"].engine.load().num_remote_prefills > 0
        assert fleet["d"].engine.load().num_recomputed_tokens == 0
        await fleet.until_empty()
