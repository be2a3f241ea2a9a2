"""SGLang's own series on its worker's /metrics, and that busway's count of KV bytes is SGLang's."""

import asyncio
import urllib.request

from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = only("sglang")

TRANSFERRED = "sglang:kv_transfer_total_mb_sum"
MIB = 2**20


async def transferred_bytes(desk: Desk) -> float:
    url = (await desk.record(desk.pair.prefill)).metrics_url
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(TRANSFERRED)) * MIB


async def test_the_bytes_that_moved_are_the_engines_own_count(desk: Desk) -> None:
    own, ours = await transferred_bytes(desk), (await desk.load(desk.pair.prefill.id)).kv_transfer_bytes
    got = await desk.disaggregated(desk.request(prompt(90, salt=351), 3))
    await desk.until_free(20.0)
    grown = (await desk.load(desk.pair.prefill.id)).kv_transfer_bytes["nixl"] - ours.get("nixl", 0)
    assert grown == got.finished.timings.kv_bytes > 0
    assert abs(await transferred_bytes(desk) - own - grown) < 1.0
