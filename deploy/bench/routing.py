"""Routing: what a decision costs, and what it is worth on real traces beside Dynamo's replay of the same traces."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from schemas.ids import WorkerId
from services.prefix_hash import block_hashes
from services.router.prefix_index import PrefixIndex

BLOCK_SIZE = 64


def median_ms(action: Callable[[], object], rounds: int) -> float:
    """Return the median milliseconds of the action."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def crowded_index(ids: tuple[int, ...], num_workers: int, max_blocks: int) -> PrefixIndex:
    """Return an index where each worker holds another share of the prompt, from one block to all."""
    index, hashes = PrefixIndex(max_blocks), block_hashes(ids, BLOCK_SIZE)
    for number in range(num_workers):
        share = 1 + number * (len(hashes) - 1) // (num_workers - 1)
        index.stored(WorkerId(f"w{number}"), hashes[:share])
    return index


def measure_lookup(rounds: int) -> dict[str, float]:
    """Return milliseconds to hash a 128k-token prompt and to find its prefix on 1,000 workers that all hold some."""
    ids = tuple(np.random.default_rng(1).integers(0, 150_000, 131_072).tolist())
    hashes = block_hashes(ids, BLOCK_SIZE)
    index = crowded_index(ids, 1000, 1 << 20)
    return {
        "hash_ms": median_ms(lambda: block_hashes(ids, BLOCK_SIZE), rounds),
        "match_ms": median_ms(lambda: index.match(hashes), rounds),
        "match_unknown_ms": median_ms(lambda: index.match(hashes + np.uint64(1)), rounds),
    }


def measure_memory(num_blocks: int, num_workers: int = 1000) -> dict[str, float]:
    """Fill an index with random blocks, 128 a call, a tenth of them held by a second worker; count what it took."""
    gc.collect()
    process, rng = psutil.Process(), np.random.default_rng(2)
    before = process.memory_info().rss
    index = PrefixIndex(num_blocks)
    start, calls = time.process_time(), 0
    for _ in range(num_blocks // 128):
        hashes = rng.integers(1, 2**63, 128, dtype=np.uint64)
        first, second = rng.integers(0, num_workers, 2).tolist()
        index.stored(WorkerId(f"w{first}"), hashes)
        if calls % 10 == 0:
            index.stored(WorkerId(f"w{second}"), hashes)
        calls += 1
    cpu_s = time.process_time() - start
    used = process.memory_info().rss - before
    known = index.num_blocks
    clear_ms = median_ms(lambda: index.cleared(WorkerId("w1")), 1)
    return {
        "blocks": float(known),
        "bytes_per_block": used / known,
        "table_bytes_per_block": index.nbytes / known,
        "holder_sets": float(index.num_holder_sets),
        "stored_us_per_event_of_128_blocks": cpu_s / calls * 1e6,
        "clear_a_worker_ms": clear_ms,
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return the index's costs."""
    return {
        "index": {
            "128k tokens, 1000 workers": measure_lookup(5 if quick else 30),
            "memory": measure_memory(100_000 if quick else 10_000_000),
        },
    }
