"""Attention over the paged pool by torch's own operators.

K and V are gathered by ONE index_select of whole (block, head) rows: in a head-major pool each is one contiguous
piece. Chunks of prompts go through SDPA, which on CPUs keeps scores in float32 and was 1.2 to 5 times faster than
matmuls that do. Decoding doesn't: with one query and grouped heads SDPA was 20 times slower (torch 2.13). Its scores
are float32, too: rounded to bfloat16 they doubled the divergence from the model in float32
(tests/engines/torch/test_half_precision.py). Weights and values stay in the model's dtype, which costs no precision
that was seen and 0.6 of the time.
"""

import torch
import torch.nn.functional as F

from services.engines.torch.reads import Chunk, DecodeGroup


class GatheredAttention:
    """Attention for one runner. Gathers go into one buffer that is kept and grows: fresh memory of tens of MB would
    be paged in at each layer of each step (24 sequences of 1,040 tokens: 89 ms a layer instead of 5).

    `queries` and `out` are [num_tokens, kv_heads, group, head_dim]; `block_rows` [2 * num_blocks * kv_heads,
    block_size * head_dim] is one layer of the pool, this step's K and V written.
    """

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._buffer: torch.Tensor | None = None
        self._wide: torch.Tensor | None = None

    def decode(self, queries: torch.Tensor, block_rows: torch.Tensor, group: DecodeGroup, out: torch.Tensor) -> None:
        """Write what the group's tokens find into their part of `out`."""
        wanted = slice(group.first, group.last)
        keys, values = self._gather(block_rows, group.rows, (group.last - group.first, queries.shape[1]))
        scaled = queries[wanted].float() * self._head_dim**-0.5
        scores = torch.matmul(scaled, self._widened(keys).transpose(-1, -2))
        weights = torch.softmax(scores.masked_fill_(group.hidden, float("-inf")), dim=-1)
        out[wanted] = torch.matmul(weights.to(values.dtype), values)

    def prefill(self, queries: torch.Tensor, block_rows: torch.Tensor, chunk: Chunk, out: torch.Tensor) -> None:
        """Write what the chunk's tokens find into their part of `out`."""
        num_tokens, num_kv_heads = chunk.last - chunk.first, queries.shape[1]
        keys, values = self._gather(block_rows, chunk.rows, (1, num_kv_heads))
        shape = (num_tokens, -1, self._head_dim)
        by_head = queries[chunk.first : chunk.last].reshape(shape).transpose(0, 1)[None]
        found = out[chunk.first : chunk.last].view(shape)
        for first, last, low, high, mask in chunk.query_blocks:
            found[first:last] = F.scaled_dot_product_attention(
                by_head[:, :, first:last],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)

    def _gather(
        self, block_rows: torch.Tensor, rows: torch.Tensor, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [*shape, tokens, head_dim] of these rows, in a buffer: valid until the next
        gather."""
        self._buffer = _at_least(self._buffer, len(rows), block_rows)
        found = torch.index_select(block_rows, 0, rows, out=self._buffer[: len(rows)])
        keys, values = found.view(2, *shape, -1, self._head_dim)
        return keys, values

    def _widened(self, keys: torch.Tensor) -> torch.Tensor:
        if keys.dtype == torch.float32:
            return keys
        flat = keys.view(-1, self._head_dim)
        self._wide = _at_least(self._wide, len(flat), flat[:0].float())
        return self._wide[: len(flat)].copy_(flat).view(keys.shape)


def _at_least(buffer: torch.Tensor | None, num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return a buffer of at least so many rows: this one if it is large enough."""
    if buffer is not None and buffer.shape[0] >= num_rows:
        return buffer
    return like.new_empty(num_rows * 5 // 4, like.shape[1])
