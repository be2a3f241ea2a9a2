"""The serving layer's own cost: CPU per request and per token with a simulated engine, beside Dynamo's with its own.

Both stacks answer the same prompts with 1 prefill and 1 decode worker, in turns A B A B in one run. Two loads
separate the cost of a request from that of a token: cost = request + token * osl.
"""

import asyncio
import statistics
from typing import Any

from deploy.bench.load import Load, Outcome, percentile, run_load
from deploy.bench.stack import Stack, busway_stack, has_peer, peer_stack

SHORT_OSL, LONG_OSL = 4, 64


def measure(stack: Stack, *, concurrency: int, osl_tokens: int, max_s: float) -> dict[str, Any]:
    """Return CPU ms per request by part, and the client's times, under one load."""
    warmup = Load(
        url=stack.url,
        model=stack.model,
        concurrency=4,
        num_requests=16,
        isl_words=128,
        osl_tokens=osl_tokens,
    )
    asyncio.run(run_load(warmup))
    before = stack.cpu_s()
    load = Load(
        url=stack.url,
        model=stack.model,
        concurrency=concurrency,
        num_requests=100_000,
        isl_words=128,
        osl_tokens=osl_tokens,
        max_s=max_s,
    )
    outcome: Outcome = asyncio.run(run_load(load))
    after = stack.cpu_s()
    if not outcome.num_ok:
        raise RuntimeError(f"no request succeeded: {outcome.errors[:3]}")
    parts = {part: (after[part] - before[part]) * 1e3 / outcome.num_ok for part in before}
    return {
        "osl_tokens": osl_tokens,
        "ok": outcome.num_ok,
        "failed": outcome.num_failed,
        "cpu_ms_per_request": sum(parts.values()),
        "parts_ms": parts,
        "ttft_p50_ms": percentile(outcome.ttft_s, 0.5) * 1e3,
        "requests_per_s": outcome.num_ok / outcome.wall_s,
        "rss_mib": stack.rss_mib(),
    }


def split_costs(short: dict[str, Any], long: dict[str, Any]) -> dict[str, float]:
    """Return CPU ms per request at no tokens and CPU µs per token, by the line through two loads."""
    per_token_ms = (long["cpu_ms_per_request"] - short["cpu_ms_per_request"]) / (LONG_OSL - SHORT_OSL)
    return {
        "request_ms": short["cpu_ms_per_request"] - SHORT_OSL * per_token_ms,
        "token_us": per_token_ms * 1e3,
        "whole_ms": long["cpu_ms_per_request"],
        "ttft_p50_ms": long["ttft_p50_ms"],
        "requests_per_s": long["requests_per_s"],
    }


def one_turn(stack: Stack, *, concurrency: int, max_s: float) -> dict[str, Any]:
    short = measure(stack, concurrency=concurrency, osl_tokens=SHORT_OSL, max_s=max_s)
    long = measure(stack, concurrency=concurrency, osl_tokens=LONG_OSL, max_s=max_s)
    return split_costs(short, long) | {"loads": [short, long]}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return the medians of each side over the turns, and busway's ratio to the peer where there is one."""
    turns, max_s = (1, 2.0) if quick else (3, 4.0)
    results: dict[str, list[dict[str, Any]]] = {"busway": [], "dynamo": []}
    for _ in range(turns):
        with busway_stack("--engine", "sim", "--model", "smollm2-135m-instruct", model="smollm2-135m-instruct") as a:
            results["busway"].append(one_turn(a, concurrency=32, max_s=max_s))
        if has_peer():
            with peer_stack("disagg") as b:
                results["dynamo"].append(one_turn(b, concurrency=32, max_s=max_s))
    return summary(results)


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians by side and figure, and the ratios."""
    keys = ("request_ms", "token_us", "whole_ms", "ttft_p50_ms", "requests_per_s")
    medians = {
        side: {key: statistics.median(turn[key] for turn in turns) for key in keys}
        for side, turns in results.items()
        if turns
    }
    ratios = {}
    if "dynamo" in medians:
        ratios = {key: medians["busway"][key] / medians["dynamo"][key] for key in keys}
    return {"medians": medians, "busway_to_dynamo": ratios, "turns": results}
