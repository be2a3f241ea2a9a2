"""Attention over the paged pool, as plain matmuls.

K and V are gathered by ONE index_select of whole (block, head) rows: in a head-major pool each is one contiguous
piece. SDPA isn't used: with one query and grouped heads its CPU path was 20 times slower, and its causal mask is
aligned to the top left, which is wrong for a chunk that follows others (facts measured with torch 2.13).
"""

import torch

from services.engines.torch.plan import Chunk, DecodeGroup, Reads


def attend(queries: torch.Tensor, block_rows: torch.Tensor, reads: Reads, head_dim: int) -> torch.Tensor:
    """Return [num_tokens, kv_heads, group, head_dim], as `queries` are (scaled already).

    `block_rows` [2 * num_blocks * kv_heads, block_size * head_dim] is one layer of the pool, this step's K and V
    written.
    """
    out = torch.empty_like(queries)
    for group in reads.decodes:
        out[group.first : group.last] = _decode(queries[group.first : group.last], block_rows, group, head_dim)
    for chunk in reads.chunks:
        _prefill(queries[chunk.first : chunk.last], block_rows, chunk, head_dim, out[chunk.first : chunk.last])
    return out


def _decode(queries: torch.Tensor, block_rows: torch.Tensor, group: DecodeGroup, head_dim: int) -> torch.Tensor:
    num_seqs, num_kv_heads = queries.shape[:2]
    keys, values = block_rows.index_select(0, group.rows).view(2, num_seqs, num_kv_heads, -1, head_dim)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).masked_fill_(group.hidden, float("-inf"))
    return torch.matmul(_softmax(scores), values)


def _prefill(queries: torch.Tensor, block_rows: torch.Tensor, chunk: Chunk, head_dim: int, out: torch.Tensor) -> None:
    _, num_kv_heads, group_size, _ = queries.shape
    keys, values = block_rows.index_select(0, chunk.rows).view(2, num_kv_heads, -1, head_dim)
    by_head = queries.permute(1, 2, 0, 3)
    for first, last, low, high, partial, hidden in chunk.query_blocks:
        rows = by_head[:, :, first:last].reshape(num_kv_heads, -1, head_dim)
        scores = torch.bmm(rows, keys[:, low:high].transpose(-1, -2)).view(num_kv_heads, group_size, last - first, -1)
        scores[..., partial - low :].masked_fill_(hidden, float("-inf"))
        weights = _softmax(scores).view(num_kv_heads, -1, high - low)
        found = torch.bmm(weights, values[:, low:high]).view(num_kv_heads, group_size, last - first, head_dim)
        out[first:last] = found.permute(2, 0, 1, 3)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
