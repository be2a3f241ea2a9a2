"""Attention over the paged pool, as plain matmuls.

K and V are gathered by ONE index_select of whole (block, head) rows: in a head-major pool each is one contiguous
piece. SDPA isn't used: with one query and grouped heads its CPU path was 20 times slower, and its causal mask is
aligned to the top left, which is wrong for a chunk that follows others (facts measured with torch 2.13).

Scores and softmax are float32 whatever the model's dtype is: scores rounded to bfloat16 doubled the divergence from the
model in float32 (tests/engines/torch/test_half_precision.py). Weights and values stay in the model's dtype, which costs
no precision that was seen and 0.6 of the time.
"""

import torch

from services.engines.torch.plan import Chunk, DecodeGroup, Reads


class PagedAttention:
    """Attention for one runner. Gathers go into one buffer that is kept and grows: fresh memory of tens of MB would
    be paged in at each layer of each step (24 sequences of 1,040 tokens: 89 ms a layer instead of 5)."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._buffer: torch.Tensor | None = None
        self._wide: torch.Tensor | None = None

    def attend(self, queries: torch.Tensor, block_rows: torch.Tensor, reads: Reads) -> torch.Tensor:
        """Return [num_tokens, kv_heads, group, head_dim] in the dtype of `queries` (scaled already).

        `block_rows` [2 * num_blocks * kv_heads, block_size * head_dim] is one layer of the pool, this step's K and V
        written.
        """
        out = torch.empty_like(queries)
        queries = queries.float()
        for group in reads.decodes:
            out[group.first : group.last] = self._decode(queries[group.first : group.last], block_rows, group)
        for chunk in reads.chunks:
            self._prefill(queries[chunk.first : chunk.last], block_rows, chunk, out[chunk.first : chunk.last])
        return out

    def _decode(self, queries: torch.Tensor, block_rows: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        num_seqs, num_kv_heads = queries.shape[:2]
        keys, values = self._gather(block_rows, group.rows, (num_seqs, num_kv_heads, -1, self._head_dim))
        scores = torch.matmul(queries, keys.transpose(-1, -2)).masked_fill_(group.hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)

    def _prefill(self, queries: torch.Tensor, block_rows: torch.Tensor, chunk: Chunk, out: torch.Tensor) -> None:
        _, num_kv_heads, group_size, head_dim = queries.shape
        keys, values = self._gather(block_rows, chunk.rows, (num_kv_heads, -1, head_dim))
        by_head = queries.permute(1, 2, 0, 3)
        for first, last, low, high, partial, hidden in chunk.query_blocks:
            rows = by_head[:, :, first:last].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(rows, keys[:, low:high].transpose(-1, -2)).view(
                num_kv_heads, group_size, last - first, -1
            )
            scores[..., partial - low :].masked_fill_(hidden, float("-inf"))
            weights = torch.softmax(scores, dim=-1).to(values.dtype).view(num_kv_heads, -1, high - low)
            found = torch.bmm(weights, values[:, low:high]).view(num_kv_heads, group_size, last - first, head_dim)
            out[first:last] = found.permute(2, 0, 1, 3)

    def _gather(
        self, block_rows: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys (float32) and the values (as they are) of these rows, in buffers: valid until the next
        gather."""
        self._buffer = _at_least(self._buffer, len(rows), block_rows)
        found = torch.index_select(block_rows, 0, rows, out=self._buffer[: len(rows)])
        keys, values = found.view(2, *shape)
        if keys.dtype == torch.float32:
            return keys, values
        like = block_rows.new_empty(0, block_rows.shape[1], dtype=torch.float32)
        self._wide = _at_least(self._wide, len(rows) // 2, like)
        return self._wide[: len(rows) // 2].view(shape).copy_(keys), values


def _at_least(buffer: torch.Tensor | None, num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return a buffer of at least so many rows: this one if it is large enough."""
    if buffer is not None and buffer.shape[0] >= num_rows:
        return buffer
    return like.new_empty(num_rows * 5 // 4, like.shape[1])
