"""TensorRT-LLM's own series on its worker's /metrics, by the stand-in's collector."""

import asyncio
import urllib.request

from tests.conformance.engines import only
from tests.conformance.pair import Desk, WorkerProcess
from tests.conformance.prompts import prompt

pytestmark = only("trtllm-stand-in")


async def scrape(desk: Desk, worker: WorkerProcess) -> dict[str, float]:
    """Return the samples by name, summed over their labels."""
    url = (await desk.record(worker)).metrics_url
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
    return found


async def test_they_count_what_the_engine_does(desk: Desk) -> None:
    sides = (desk.pair.prefill, desk.pair.decode)
    before = [await scrape(desk, worker) for worker in sides]
    got = await desk.disaggregated(desk.request(prompt(90, salt=92), 5))
    assert len(got.ids) == 5
    after = [await scrape(desk, worker) for worker in sides]

    def grown(side: int, name: str) -> float:
        return after[side][name] - before[side].get(name, 0.0)

    assert grown(0, "trtllm_request_success_total") == 1
    assert grown(0, "trtllm_prompt_tokens_total") == 90
    assert grown(1, "trtllm_request_success_total") == 1
    assert grown(1, "trtllm_generation_tokens_total") == 5
    for side in after:
        assert side["busway_engine_metrics_up"] == 1
        assert "trtllm_kv_cache_used_blocks" in side
