"""The sim engine's KV pool: real bytes in the layout of services.kv.layout, [1, 2, num_blocks, 1, block_size, lanes].

The k row of a position is the rolling state and the v row its token id, each repeated over all lanes. Reading takes
a weighted sum over the lanes, so one wrong lane is a wrong value.
"""

import numpy as np
import numpy.typing as npt

from services.engines.sim.arithmetic import MASK, U64, position_weights
from services.kv.layout import KvLayout, KvRegion


class SimPool:
    """Rows are addressed by slot: block_id * block_size + offset."""

    def __init__(self, memory: memoryview, num_blocks: int, layout: KvLayout) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        num_slots, lanes = num_blocks * layout.block_size, layout.head_dim
        self._bytes = np.frombuffer(memory, dtype=np.uint64)
        rows = self._bytes.reshape(2, num_slots, lanes)
        self._keys, self._values = rows[0], rows[1]
        # One lane: plain Python access is five times as fast as numpy's for a single number.
        self._numbers = memoryview(memory).cast("B").cast("Q") if lanes == 1 else None
        self._num_slots = num_slots
        self._lane_weights = _lane_weights(lanes)
        self._weights = position_weights(1024)

    def region(self) -> KvRegion:
        """Return the pool's memory."""
        return KvRegion(
            address=self._bytes.ctypes.data,
            num_bytes=self._bytes.nbytes,
            num_blocks=self._num_blocks,
            memory="DRAM",
            device_id=0,
            layout=self._layout,
        )

    def read(self, slot: int) -> tuple[int, int]:
        """Return the state and token id of one row."""
        if self._numbers is not None:
            return self._numbers[slot], self._numbers[self._num_slots + slot]
        weights = self._lane_weights
        return int((self._keys[slot] * weights).sum()), int((self._values[slot] * weights).sum())

    def write(self, slot: int, state: int, token_id: int) -> None:
        """Store one row."""
        if self._numbers is not None:
            self._numbers[slot] = state
            self._numbers[self._num_slots + slot] = token_id
        else:
            self._keys[slot] = np.uint64(state)
            self._values[slot] = np.uint64(token_id)

    def write_many(self, slots: npt.NDArray[np.int64], states: U64, token_ids: U64) -> None:
        """Store rows [n]."""
        self._keys[slots] = states[:, None]
        self._values[slots] = token_ids[:, None]

    def read_all(self, block_table: list[int], num_tokens: int) -> int:
        """Return a sum over all rows of a sequence's first `num_tokens` positions, weighted by position."""
        block_size, lanes = self._layout.block_size, self._layout.head_dim
        table = np.array(block_table[: -(-num_tokens // block_size)], dtype=np.int64)
        if len(self._weights) < num_tokens:
            self._weights = position_weights(2 * num_tokens)
        weights = self._weights[:num_tokens]
        total = 0
        for salt, rows in ((1, self._keys), (3, self._values)):
            found = rows.reshape(-1, block_size, lanes)[table].reshape(-1, lanes)[:num_tokens]
            summed = found[:, 0] if lanes == 1 else (found * self._lane_weights).sum(axis=1, dtype=np.uint64)
            total += salt * int((summed * weights).sum(dtype=np.uint64))
        return total & MASK


def _lane_weights(lanes: int) -> U64:
    """Return odd weights whose sum is 1 modulo 2^64 (for one lane: 1)."""
    weights = position_weights(lanes)
    weights[0] = np.uint64((1 - int(weights[1:].sum(dtype=np.uint64))) & MASK)
    return weights
