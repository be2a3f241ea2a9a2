"""Attention over the paged pool, as plain matmuls.

K and V are gathered by ONE index_select of whole (block, head) rows: in a head-major pool each is one contiguous
piece. SDPA isn't used: with one query and grouped heads its CPU path was 20 times slower, and its causal mask is
aligned to the top left, which is wrong for a chunk that follows others (facts measured with torch 2.13).
"""

import torch

from services.engines.torch.plan import Chunk, DecodeGroup, Reads


class PagedAttention:
    """Attention for one runner. Gathers go into one buffer that is kept and grows: fresh memory of tens of MB would
    be paged in at each layer of each step (24 sequences of 1,040 tokens: 89 ms a layer instead of 5)."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._buffer: torch.Tensor | None = None

    def attend(self, queries: torch.Tensor, block_rows: torch.Tensor, reads: Reads) -> torch.Tensor:
        """Return [num_tokens, kv_heads, group, head_dim], as `queries` are (scaled already).

        `block_rows` [2 * num_blocks * kv_heads, block_size * head_dim] is one layer of the pool, this step's K and V
        written.
        """
        out = torch.empty_like(queries)
        for group in reads.decodes:
            out[group.first : group.last] = self._decode(queries[group.first : group.last], block_rows, group)
        for chunk in reads.chunks:
            self._prefill(queries[chunk.first : chunk.last], block_rows, chunk, out[chunk.first : chunk.last])
        return out

    def _decode(self, queries: torch.Tensor, block_rows: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        num_seqs, num_kv_heads = queries.shape[:2]
        keys, values = self._gather(block_rows, group.rows).view(2, num_seqs, num_kv_heads, -1, self._head_dim)
        scores = torch.matmul(queries, keys.transpose(-1, -2)).masked_fill_(group.hidden, float("-inf"))
        return torch.matmul(_softmax(scores), values)

    def _prefill(self, queries: torch.Tensor, block_rows: torch.Tensor, chunk: Chunk, out: torch.Tensor) -> None:
        _, num_kv_heads, group_size, head_dim = queries.shape
        keys, values = self._gather(block_rows, chunk.rows).view(2, num_kv_heads, -1, head_dim)
        by_head = queries.permute(1, 2, 0, 3)
        for first, last, low, high, partial, hidden in chunk.query_blocks:
            rows = by_head[:, :, first:last].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(rows, keys[:, low:high].transpose(-1, -2)).view(
                num_kv_heads, group_size, last - first, -1
            )
            scores[..., partial - low :].masked_fill_(hidden, float("-inf"))
            weights = _softmax(scores).view(num_kv_heads, -1, high - low)
            found = torch.bmm(weights, values[:, low:high]).view(num_kv_heads, group_size, last - first, head_dim)
            out[first:last] = found.permute(2, 0, 1, 3)

    def _gather(self, block_rows: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return these rows, in the buffer: valid until the next gather."""
        if self._buffer is None or self._buffer.shape[0] < len(rows):
            self._buffer = block_rows.new_empty(len(rows) * 5 // 4, block_rows.shape[1])
        return torch.index_select(block_rows, 0, rows, out=self._buffer[: len(rows)])


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
