"""The router's prefix index at its limits: 10 million blocks, and a 128k-token prompt against 1,000 workers.

Memory is that of a process of its own, which does nothing else. Times are beside one pass of the same hash function
over the prompt's bytes, so that they mean something on any machine.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from xxhash import xxh3_64_intdigest

from schemas.ids import WorkerId
from services.prefix_hash import block_hashes
from services.router.prefix_index import PrefixIndex

BLOCK_SIZE = 64
NUM_WORKERS = 1000
PROMPT_TOKENS = 131_072
BLOCKS_A_CALL = 128


def median_ms(action: Callable[[], object], rounds: int) -> float:
    """Return the median milliseconds of CPU that the action takes: others on the machine don't count."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
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
    ids = tuple(np.random.default_rng(1).integers(0, 150_000, PROMPT_TOKENS).tolist())
    packed = np.array(ids, dtype=np.uint32).tobytes()
    hashes = block_hashes(ids, BLOCK_SIZE)
    index = crowded_index(ids, NUM_WORKERS, 1 << 20)
    hash_ms = median_ms(lambda: block_hashes(ids, BLOCK_SIZE), rounds)
    match_ms = median_ms(lambda: index.match(hashes), rounds)
    plain_ms = median_ms(lambda: xxh3_64_intdigest(packed), rounds)
    return {
        "hash_ms": hash_ms,
        "match_ms": match_ms,
        "match_unknown_ms": median_ms(lambda: index.match(hashes + np.uint64(1)), rounds),
        "plain_xxh3_ms": plain_ms,
        "hash_and_match_to_10_ms": (hash_ms + match_ms) / 10,
        "hash_and_match_to_plain_xxh3": (hash_ms + match_ms) / plain_ms,
    }


def measure_memory(num_blocks: int) -> dict[str, float]:
    """Fill an index with random blocks, a tenth of them held by a second worker, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_fill, (num_blocks,))


def _fill(num_blocks: int) -> dict[str, float]:
    gc.collect()
    process, rng = psutil.Process(), np.random.default_rng(2)
    before = process.memory_info().rss
    index = PrefixIndex(num_blocks)
    start, num_calls = time.process_time(), num_blocks // BLOCKS_A_CALL
    for call in range(num_calls):
        hashes = rng.integers(1, 2**63, BLOCKS_A_CALL, dtype=np.uint64)
        first, second = rng.integers(0, NUM_WORKERS, 2).tolist()
        index.stored(WorkerId(f"w{first}"), hashes)
        if call % 10 == 0:
            index.stored(WorkerId(f"w{second}"), hashes)
    cpu_s = time.process_time() - start
    used, known = process.memory_info().rss - before, index.num_blocks
    return {
        "blocks": float(known),
        "mib": used / 2**20,
        "bytes_per_block": used / known,
        "table_bytes_per_block": index.nbytes / known,
        "holder_sets": float(index.num_holder_sets),
        "stored_us_per_event_of_128_blocks": cpu_s / num_calls * 1e6,
        "clear_a_worker_ms": median_ms(lambda: index.cleared(WorkerId("w1")), 1),
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return what a lookup and a block cost."""
    return {
        "128k tokens, 1000 workers": measure_lookup(5 if quick else 30),
        "memory": measure_memory(100_000 if quick else 10_000_000),
    }
