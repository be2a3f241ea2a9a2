"""One step's indices, computed once and used by every layer: where tokens are written, which rows attention reads.

A step is a mixed batch: linears run over all its tokens together, attention separately for sequences that decode
(one token each) and for chunks of prompts (each by blocks of queries).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from services.engines.torch.reads import Reads, read_chunk
from services.engines.torch.step import StepSlices


class StepPlan(NamedTuple):
    """`key_rows` [num_tokens * kv_heads] are token rows of the pool (values lie one half of it further on).
    `tail_rows` [n]: value rows, in their half, behind the tokens that are the first in their block: gathered attention
    weighs them by 0, so they must be finite, and a block that was a broken sequence's needn't be. `sample_rows`: tokens
    whose logits are wanted."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    key_rows: torch.Tensor
    tail_rows: torch.Tensor
    reads: dict[int | None, Reads]
    sample_rows: torch.Tensor


def plan_step(
    step: StepSlices, windows: set[int | None], read_decodes: Callable[[StepSlices, int | None], Any]
) -> StepPlan:
    """Return the plan of these slices, its tensors on their device. `read_decodes` says, under one window, what the
    decoding sequences read."""
    device = step.device
    chunks = range(step.num_decodes, len(step.slices))
    return StepPlan(
        token_ids=torch.tensor([token for piece in step.slices for token in piece.token_ids], device=device),
        positions=step.positions.to(device),
        key_rows=_key_rows(step).to(device),
        tail_rows=_tail_rows(step).to(device),
        reads={
            window: Reads(read_decodes(step, window), [read_chunk(step, i, window) for i in chunks])
            for window in windows
        },
        sample_rows=_sample_rows(step).to(device),
    )


def _sample_rows(step: StepSlices) -> torch.Tensor:
    ends = zip(step.slices, step.firsts[1:], strict=True)
    return torch.tensor([end - 1 for piece, end in ends if piece.sample is not None], dtype=torch.int64)


def _key_rows(step: StepSlices) -> torch.Tensor:
    size = step.layout.block_size
    blocks = torch.cat([_blocks_of_tokens(step, i) for i in range(len(step.slices))])
    return (step.block_rows(blocks[:, None])[..., 0] * size + (step.positions % size)[:, None]).flatten()


def _blocks_of_tokens(step: StepSlices, index: int) -> torch.Tensor:
    size = step.layout.block_size
    first = step.slices[index].start // size
    table = torch.tensor(step.slices[index].block_table[first : step.last_block(index)])
    return table[step.positions[step.firsts[index] : step.firsts[index + 1]] // size - first]


def _tail_rows(step: StepSlices) -> torch.Tensor:
    size = step.layout.block_size
    rows = [torch.empty(0, dtype=torch.int64)]
    for piece in step.slices:
        last, offset = divmod(piece.end, size)
        if offset and piece.start <= last * size:
            block_rows = step.block_rows(torch.tensor([piece.block_table[last]]))
            rows.append((block_rows * size + torch.arange(offset, size)).flatten())
    return torch.cat(rows)
