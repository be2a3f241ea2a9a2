"""Why prefill and decode live apart: the gaps of four streams while a 4,000-token prompt is computed.

The same model on the same threads in one run: two workers of one thread each as 1P1D, and one worker `both` of one
thread; and, for fairness to the machine, one `both` of two threads.
"""

import asyncio
import random
import time
from typing import Any

import aiohttp

from deploy.bench.load import WORDS, Load, Outcome, chat_once, make_body, percentile
from deploy.bench.stack import Stack, busway_stack

MODEL = "smollm2-135m-instruct"


async def streams_beside_prompt(stack: Stack, *, prompt_words: int, osl_tokens: int) -> dict[str, float]:
    """Return the ITL p50 and p99 in seconds of four streams during which one long prompt arrives."""
    rng = random.Random(time.time_ns())
    load = Load(url=stack.url, model=stack.model, concurrency=4, num_requests=4, isl_words=64, osl_tokens=osl_tokens)
    outcome, long_outcome, started = Outcome(), Outcome(), asyncio.Semaphore(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def long_prompt() -> None:
            for _ in range(4):
                await started.acquire()
            body = make_body(load, rng.choices(WORDS, k=prompt_words)) | {"max_tokens": 2}
            await chat_once(session, stack.url, body, long_outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                body = make_body(load, rng.choices(WORDS, k=64))
                group.create_task(chat_once(session, stack.url, body, outcome, on_first=started.release))
            group.create_task(long_prompt())
    if outcome.num_failed or long_outcome.num_failed:
        raise RuntimeError(f"requests failed: {outcome.errors + long_outcome.errors}")
    return {
        "itl_p50_s": percentile(outcome.itl_s, 0.5),
        "itl_p99_s": percentile(outcome.itl_s, 0.99),
        "itl_max_s": max(outcome.itl_s),
        "long_ttft_s": long_outcome.ttft_s[0],
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return the ITL p99 of each arrangement and the ratio of 1P1D to one `both` worker (below 1: apart is better)."""
    threads = ("--engine-arg", "threads=1")
    fleets = {
        "1P1D": ("--prefill", "1", "--decode", "1", *threads),
        "both, 1 thread": ("--prefill", "0", "--decode", "0", "--both", "1", *threads),
        "both, 2 threads": ("--prefill", "0", "--decode", "0", "--both", "1", "--engine-arg", "threads=2"),
    }
    results = {}
    for name, flags in fleets.items():
        with busway_stack("--model", MODEL, *flags, model=MODEL) as stack:
            results[name] = asyncio.run(
                streams_beside_prompt(stack, prompt_words=1000 if quick else 4000, osl_tokens=60 if quick else 300)
            )
    apart = results["1P1D"]["itl_p99_s"]
    return {
        "fleets": results,
        "itl_p99_ratio": {name: apart / r["itl_p99_s"] for name, r in results.items() if name != "1P1D"},
    }
