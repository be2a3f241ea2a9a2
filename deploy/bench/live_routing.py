"""Policy kv beside round robin through the real bus: 2P2D of sim workers, prompts that share their beginnings.

Each prefill worker's cache holds about 10 of the 16 beginnings: whoever knows which is where computes far less.
"""

import asyncio
from statistics import median
from typing import Any

from deploy.bench.live_fleet import live_fleet, names_of
from deploy.bench.shared_prefixes import Workload, mean_ttft_ms, play, reuse
from services.config import PolicyName

ENGINE_ARGS = {"num_blocks": "700", "prefill_ms_per_token": "0.3", "decode_ms_per_step": "2"}
WORK = Workload()
NUM_REQUESTS, RATE = 160, 5.0
POLICIES: tuple[PolicyName, ...] = ("kv", "round_robin")


async def measure(policy: PolicyName, num_requests: int = NUM_REQUESTS, rate: float = RATE) -> dict[str, float]:
    """Return what a policy makes of the workload."""
    async with live_fleet(*names_of(g=1, r=1, p=2, d=2), policy=policy, engine_args=ENGINE_ARGS) as fleet:
        asked = await play(fleet, WORK, numbers=range(num_requests), rate=rate)
        failed = [one.error for one in asked if one.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[:3]}")
        return {"reuse": reuse(asked), "ttft_mean_ms": mean_ttft_ms(asked)}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return reuse and mean TTFT of both policies, in turns, and the ratios of kv to round robin."""
    turns = [
        {policy: asyncio.run(measure(policy, 32 if quick else NUM_REQUESTS)) for policy in POLICIES}
        for _ in range(1 if quick else 3)
    ]
    return {
        "reuse": {policy: median(turn[policy]["reuse"] for turn in turns) for policy in POLICIES},
        "ttft_mean_ms": {policy: median(turn[policy]["ttft_mean_ms"] for turn in turns) for policy in POLICIES},
        "ttft_kv_to_round_robin": median(
            turn["kv"]["ttft_mean_ms"] / turn["round_robin"]["ttft_mean_ms"] for turn in turns
        ),
        "turns": turns,
    }
