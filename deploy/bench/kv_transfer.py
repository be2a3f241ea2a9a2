"""KV transfer between two processes, beside a plain copy of the same bytes in one process, in turns.

The pool is that of SmolLM2-135M in float32 with blocks of 16; each move takes scattered blocks.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from services.kv.layout import KvLayout, KvRegion
from services.kv.transfer import KvTransfer

NUM_BLOCKS = 512
LAYOUT = KvLayout(
    num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32", itemsize_bytes=4
)  # 12 KiB rows


def make_transfer(kind: str) -> KvTransfer:
    if kind == "nixl":
        from services.kv.nixl import NixlTransfer

        return NixlTransfer()
    from services.kv.shm import ShmTransfer

    return ShmTransfer()


def serve_pool(transfer: KvTransfer) -> tuple[np.ndarray[Any, Any], bytes]:
    """Allocate and register a pool; return its bytes as [layers * 2, blocks, row_bytes] and the peer's blob."""
    buffer = transfer.allocate_host(LAYOUT.block_bytes * NUM_BLOCKS)
    pool = np.frombuffer(buffer, dtype=np.uint8)
    region = KvRegion(
        address=int(pool.ctypes.data),
        num_bytes=pool.nbytes,
        num_blocks=NUM_BLOCKS,
        memory="DRAM",
        device_id=0,
        layout=LAYOUT,
    )
    blob = transfer.register(region)
    return pool.reshape(LAYOUT.num_layers * 2, NUM_BLOCKS, LAYOUT.row_bytes), blob


def source_process(kind: str, pipe: Connection) -> None:
    transfer = make_transfer(kind)
    pool, blob = serve_pool(transfer)
    pool[:] = np.random.default_rng(7).integers(0, 256, pool.shape, dtype=np.uint8)
    pipe.send_bytes(blob)
    peer_blob = pipe.recv_bytes()
    transfer.add_peer("sink", peer_blob, NUM_BLOCKS)
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    transfer.close()


def timed(action: Callable[[], None], rounds: int) -> float:
    """Return the median seconds of the action."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(kind: str, *, num_blocks: int, rounds: int) -> dict[str, float]:
    """Return GB/s of a READ of `num_blocks` scattered blocks and of a per-row copy of the same bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source_process, args=(kind, theirs))
    process.start()
    transfer = make_transfer(kind)
    pool, blob = serve_pool(transfer)
    peer_blob = ours.recv_bytes()
    ours.send_bytes(blob)
    transfer.add_peer("source", peer_blob, NUM_BLOCKS)
    ours.recv_bytes()
    rng = np.random.default_rng(3)
    local = rng.permutation(NUM_BLOCKS)[:num_blocks].astype(np.int64)
    remote = rng.permutation(NUM_BLOCKS)[:num_blocks].astype(np.int64)

    def read() -> None:
        handle = transfer.post("read", "source", local, remote)
        while not transfer.poll(handle):
            pass

    plain = np.empty_like(pool)

    def copy() -> None:
        for layer in range(pool.shape[0]):
            plain[layer, local] = pool[layer, remote]

    read()
    expected = np.random.default_rng(7).integers(0, 256, pool.shape, dtype=np.uint8)
    if not np.array_equal(pool[:, local], expected[:, remote]):
        raise RuntimeError(f"{kind}: the bytes read are not the source's")
    turns = [(timed(read, rounds), timed(copy, rounds)) for _ in range(5)]
    num_bytes = num_blocks * LAYOUT.block_bytes
    result = {
        "read_gb_per_s": num_bytes / statistics.median(t[0] for t in turns) / 1e9,
        "copy_gb_per_s": num_bytes / statistics.median(t[1] for t in turns) / 1e9,
        "read_to_copy": statistics.median(t[1] / t[0] for t in turns),
        "num_bytes": float(num_bytes),
    }
    ours.send_bytes(b"done")
    process.join(timeout=10)
    transfer.close()
    return result


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return speeds of both transports for a short and a long prompt's KV."""
    rounds = 3 if quick else 15
    return {
        f"{kind}, {blocks * 16} tokens": measure(kind, num_blocks=blocks, rounds=rounds)
        for kind in ("nixl", "shm")
        for blocks in (8, 128)
    }
