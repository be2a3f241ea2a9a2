"""The KV pool: one allocation [num_layers, 2 (k, v), num_blocks, num_kv_heads, block_size, head_dim].

Knows where a token's and a block's rows lie; not whose they are.
"""

import torch

from services.engines.paged.runner import AllocateHost
from services.kv.layout import KvLayout, KvRegion


class KvPool:
    """The pool's memory and its views. Host memory comes from `allocate` and outlives the pool; CUDA memory is
    torch's and lives as long as this object."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, allocate: AllocateHost) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shape = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        if device.type == "cpu":
            host = allocate(num_blocks * layout.block_bytes)
            self.tensor = torch.frombuffer(host, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        # One layer's tokens: row ((c * num_blocks + block) * num_kv_heads + head) * block_size + offset.
        self.token_rows = self.tensor.view(layout.num_layers, -1, layout.head_dim)
        # One layer's (k or v, block, head)s: row (c * num_blocks + block) * num_kv_heads + head.
        self.block_rows = self.tensor.view(layout.num_layers, -1, layout.block_size * layout.head_dim)

    def region(self) -> KvRegion:
        """Return the pool as one region to register."""
        is_host = self.device.type == "cpu"
        return KvRegion(
            address=self.tensor.data_ptr(),
            num_bytes=self.num_blocks * self.layout.block_bytes,
            num_blocks=self.num_blocks,
            memory="DRAM" if is_host else "VRAM",
            device_id=0 if is_host else (self.device.index or 0),
            layout=self.layout,
        )
