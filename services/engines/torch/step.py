"""The slices of one step in the order in which it computes them."""

from collections.abc import Sequence

import torch

from services.engines.paged.runner import Slice
from services.kv.layout import KvLayout


class StepSlices:
    """Decodes (one token) first, shortest context first, then chunks of prompts; and the pool they read.

    `order[i]` is the place in the caller's list of the i-th slice; its tokens are [firsts[i], firsts[i + 1]) of the
    step; `positions` int64 [num_tokens] are on the CPU.
    """

    def __init__(
        self, slices: Sequence[Slice], layout: KvLayout, num_blocks: int, num_heads: int, device: torch.device
    ) -> None:
        self.order = sorted(range(len(slices)), key=lambda i: (len(slices[i].token_ids) > 1, slices[i].end))
        self.slices = [slices[i] for i in self.order]
        self.num_decodes = sum(len(piece.token_ids) == 1 for piece in slices)
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_heads = num_heads
        self.device = device
        self.firsts = [0]
        for piece in self.slices:
            self.firsts.append(self.firsts[-1] + len(piece.token_ids))
        self.positions = torch.cat([torch.arange(piece.start, piece.end) for piece in self.slices])

    def first_block(self, index: int, window: int | None) -> int:
        """Return the first block that the slice's first token sees."""
        return first_seen(self.slices[index].start, window) // self.layout.block_size

    def last_block(self, index: int) -> int:
        """Return the block after the slice's last."""
        return -(-self.slices[index].end // self.layout.block_size)

    def block_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Return the block rows [..., num_kv_heads, blocks] of the keys of these blocks [..., blocks]."""
        heads = torch.arange(self.layout.num_kv_heads)
        return table[..., None, :] * self.layout.num_kv_heads + heads[:, None]

    def keys_and_values(self, key_rows: torch.Tensor) -> torch.Tensor:
        """Return the block rows of these keys and then of their values, flat."""
        values = key_rows + self.num_blocks * self.layout.num_kv_heads
        return torch.stack([key_rows, values]).flatten().to(self.device)


def first_seen(position: int, window: int | None) -> int:
    """Return the first position that the token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def hidden(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which key positions each query position must not see: later ones, and those left of its window."""
    later = keys > queries
    return later if window is None else later | (keys <= queries - window)
