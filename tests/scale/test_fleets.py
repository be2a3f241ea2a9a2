"""Real processes with the sim engine: many of them, and what policy kv is worth through the real bus."""

import os

import pytest

from deploy.bench.fleet import measure as measure_fleet
from deploy.bench.live_routing import measure as measure_policy

pytestmark = pytest.mark.slow


def gently(rate: float) -> float:
    """Return a rate of requests: this one, less where other processes take the cores."""
    return max(2.0, rate / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


@pytest.mark.timeout(600)
async def test_fifty_workers_two_routers_and_two_gateways_answer_everything_and_share_it() -> None:
    report = await measure_fleet(
        num_prefill=25, num_decode=25, num_routers=2, num_gateways=2, num_requests=240, rate=gently(10.0)
    )
    assert not report.errors
    assert len(report.by_router) == len(report.by_gateway) == 2
    # 120 requests over the bus, of 50 beginnings: hardly any worker is left out, none is piled on.
    assert len(report.by_prefill) >= 18
    assert len(report.by_decode) >= 18
    assert max(report.by_prefill.values()) <= 30
    assert max(report.by_decode.values()) <= 30
    assert report.num_kv_events > 0
    # Each beginning has to be computed once, four of five prompts find it; blind, one in nine would.
    assert report.reuse > 0.5


@pytest.mark.timeout(300)
async def test_policy_kv_finds_prefixes_that_round_robin_misses_on_the_real_bus() -> None:
    reuse = {policy: (await measure_policy(policy, 160))["reuse"] for policy in ("kv", "round_robin")}  # type: ignore[arg-type]
    assert reuse["kv"] > reuse["round_robin"] + 0.15
