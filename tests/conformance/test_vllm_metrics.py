"""vLLM's own series on its worker's /metrics, fed without vLLM's front end."""

import asyncio
import urllib.request

from tests.conformance.engines import only
from tests.conformance.pair import Desk, WorkerProcess
from tests.conformance.prompts import prompt

pytestmark = only("vllm")

SOURCE = "vllm:prompt_tokens_by_source_total"


async def scrape(desk: Desk, worker: WorkerProcess) -> dict[tuple[str, str], float]:
    """Return the samples by name and what tells them apart: source, finished_reason, or nothing."""
    url = (await desk.record(worker)).metrics_url
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        head, _, value = line.rpartition(" ")
        name, _, labels = head.partition("{")
        pairs = dict(pair.split("=", 1) for pair in labels.rstrip("}").split(",") if "=" in pair)
        key = pairs.get("source") or pairs.get("finished_reason") or ""
        found[name, key.strip('"')] = float(value)
    return found


async def test_they_count_what_the_engine_does(desk: Desk) -> None:
    before = [await scrape(desk, worker) for worker in (desk.pair.prefill, desk.pair.decode)]
    got = await desk.disaggregated(desk.request(prompt(90, salt=91), 5))
    assert len(got.ids) == 5
    after = [await scrape(desk, worker) for worker in (desk.pair.prefill, desk.pair.decode)]

    def grown(side: int, name: str, key: str = "") -> float:
        return after[side][name, key] - before[side].get((name, key), 0.0)

    assert grown(0, SOURCE, "local_compute") == 90
    assert grown(0, "vllm:request_success_total", "length") == 1
    assert grown(1, SOURCE, "external_kv_transfer") >= 89  # vLLM computes the last one again
    assert grown(1, "vllm:generation_tokens_total") == 5
    assert grown(1, "vllm:time_to_first_token_seconds_count") == 1
    assert grown(1, "vllm:request_decode_time_seconds_count") == 1
    for side in after:
        assert side["busway_engine_metrics_up", ""] == 1
        assert ("vllm:num_requests_running", "") in side
        assert ("vllm:kv_cache_usage_perc", "") in side
        assert any(name == "process_resident_memory_bytes" for name, _ in side)
