"""The other process of a transfer, told what to do by lines of JSON on stdin; answers each with a line on stdout."""

import base64
import json
import os
import sys
import time

import numpy as np

from services.kv.layout import KvLayout, KvRegion
from services.kv.nixl import NixlTransfer
from services.kv.shm import ShmTransfer
from services.kv.transfer import KvTransfer

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=4, head_dim=64, dtype="bfloat16", itemsize_bytes=2)


def make_transfer(name: str, gb_per_s: float | None = None) -> KvTransfer:
    return NixlTransfer() if name == "nixl" else ShmTransfer(gb_per_s=gb_per_s)


class Pool:
    """A served pool and a numpy view of it: rows [num_layers x 2, num_blocks, row_bytes]."""

    def __init__(self, transfer: KvTransfer, num_blocks: int, layout: KvLayout = LAYOUT) -> None:
        memory = np.frombuffer(transfer.allocate_host(layout.block_bytes * num_blocks), np.uint8)
        self.rows = memory.reshape(layout.num_layers * 2, num_blocks, layout.row_bytes)
        self.region = KvRegion(
            address=memory.ctypes.data,
            num_bytes=memory.nbytes,
            num_blocks=num_blocks,
            memory="DRAM",
            device_id=0,
            layout=layout,
        )

    def fill(self, seed: int) -> None:
        self.rows[:] = pattern(seed, self.region.num_blocks)


def pattern(seed: int, num_blocks: int) -> np.ndarray:
    """Return what `Pool.fill` writes: random bytes, the same in every process."""
    shape = (LAYOUT.num_layers * 2, num_blocks, LAYOUT.row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def main() -> None:
    transfer = make_transfer(sys.argv[1])
    pool = Pool(transfer, int(sys.argv[2]))
    blob = transfer.register(pool.region)

    def do(order: dict) -> object:
        match order["do"]:
            case "blob":
                return base64.b64encode(blob).decode()
            case "fill":
                pool.fill(order["seed"])
            case "block":
                return pool.rows[:, order["id"]].tobytes().hex()
            case "add":
                transfer.add_peer(order["name"], base64.b64decode(order["blob"]), order["num_blocks"])
            case "post":
                handle = transfer.post(
                    order["direction"], order["peer"], np.array(order["local"]), np.array(order["remote"])
                )
                while order["wait"] and not transfer.poll(handle):
                    time.sleep(0.0005)
            case "cpu":
                return [time.process_time(), time.monotonic()]
        return None

    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
