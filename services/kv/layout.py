"""How a KV pool lies in memory: head-major, so that the slice of a head is one contiguous piece.

[num_layers, 2 (k, v), num_blocks, num_kv_heads, block_size, head_dim], one allocation per rank.
"""

import hashlib
from typing import Literal

import msgspec


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one rank's pool, number of blocks aside. `num_kv_heads` are this rank's.

    `total_kv_heads` are the model's, 0 for tp_size x num_kv_heads; it tells replicated heads (tp_size above the
    model's number) from more heads.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    itemsize_bytes: int
    tp_size: int = 1
    tp_rank: int = 0
    total_kv_heads: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one row: contiguous."""
        return self.block_size * self.head_dim * self.itemsize_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one (layer, k or v, block): contiguous."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, k and v."""
        return self.num_layers * 2 * self.row_bytes

    def digest(self) -> str:
        """Return what two pools must share for their blocks to be copied as they are."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class KvRegion(msgspec.Struct, frozen=True, kw_only=True):
    """One registered allocation. The address stays valid until the process ends."""

    address: int
    num_bytes: int
    num_blocks: int
    memory: Literal["DRAM", "VRAM"]
    device_id: int
    layout: KvLayout
