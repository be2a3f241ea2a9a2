"""One step's indices, computed once and used by every layer: where tokens are written, which rows attention reads.

A step is a mixed batch: linears run over all its tokens together, attention separately for sequences that decode
(one token each, batched by similar length) and for chunks of prompts (each by blocks of queries).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.engines.paged.runner import Slice
from services.kv.layout import KvLayout

MAX_QUERY_BLOCK = {"cpu": 128, "cuda": 1024}
MAX_SCORES = {"cpu": 2**22, "cuda": 2**26}  # of one query block, over all heads; more than 32 MB is paged in anew
# Gathered KV of one group of decoding sequences. On a CPU it is read back from a cache then, not from memory: 24
# sequences of 1,040 tokens took 6 to 7 ms of CPU time a layer two or three at a time, 11 to 13 ms all together.
MAX_GATHERED_BYTES = {"cpu": 2**21, "cuda": 2**40}


class DecodeGroup(NamedTuple):
    """Tokens [first, last) of the step, one a sequence. `rows` [2 * n * heads * blocks] of the pool's block rows;
    `hidden` bool [n, 1, 1, blocks * block_size]: what each must not see."""

    first: int
    last: int
    rows: torch.Tensor
    hidden: torch.Tensor


class QueryBlock(NamedTuple):
    """Queries [first, last) of a chunk against gathered keys [low, high). All of them see the keys below `partial`;
    `hidden` bool [last - first, high - partial] says the rest."""

    first: int
    last: int
    low: int
    high: int
    partial: int
    hidden: torch.Tensor


class Chunk(NamedTuple):
    """Tokens [first, last) of the step, of one sequence; `rows` [2 * heads * blocks] of the pool's block rows."""

    first: int
    last: int
    rows: torch.Tensor
    query_blocks: list[QueryBlock]


class Reads(NamedTuple):
    """What attention reads under one window."""

    decodes: list[DecodeGroup]
    chunks: list[Chunk]


class StepPlan(NamedTuple):
    """`order[i]` is the place in the caller's list of the plan's i-th slice. `key_rows` [num_tokens * kv_heads] are
    token rows of the pool (values lie one half of it further on). `tail_rows` [n]: value rows, in their half, behind
    the tokens that are the first in their block: attention weighs them by 0, so they must be finite, and a block that
    was a broken sequence's needn't be. `sample_rows`: tokens whose logits are wanted."""

    order: list[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    key_rows: torch.Tensor
    tail_rows: torch.Tensor
    reads: dict[int | None, Reads]
    sample_rows: torch.Tensor


def plan_step(
    slices: Sequence[Slice],
    *,
    layout: KvLayout,
    num_blocks: int,
    num_heads: int,
    windows: set[int | None],
    device: torch.device,
) -> StepPlan:
    """Return the plan for these slices; tensors are on `device`."""
    order = sorted(range(len(slices)), key=lambda i: (len(slices[i].token_ids) > 1, _end(slices[i])))
    planner = _Planner([slices[i] for i in order], layout, num_blocks, num_heads, device)
    return StepPlan(
        order=order,
        token_ids=planner.token_ids(),
        positions=planner.positions.to(device),
        key_rows=planner.key_rows(),
        tail_rows=planner.tail_rows(),
        reads={window: planner.reads(window) for window in windows},
        sample_rows=planner.sample_rows(),
    )


def _end(piece: Slice) -> int:
    return piece.start + len(piece.token_ids)


class _Planner:
    """The slices in plan order (decodes first, shortest context first) and the pool they read."""

    def __init__(
        self, slices: list[Slice], layout: KvLayout, num_blocks: int, num_heads: int, device: torch.device
    ) -> None:
        self.slices = slices
        self.block_size = layout.block_size
        self.num_kv_heads = layout.num_kv_heads
        self.num_heads = num_heads
        self.max_gathered_blocks = max(1, MAX_GATHERED_BYTES[device.type] // (2 * layout.row_bytes))
        self.num_blocks = num_blocks
        self.device = device
        self.firsts = [0]
        for piece in slices:
            self.firsts.append(self.firsts[-1] + len(piece.token_ids))
        self.positions = torch.cat([torch.arange(piece.start, _end(piece)) for piece in slices])

    def token_ids(self) -> torch.Tensor:
        return torch.tensor([token for piece in self.slices for token in piece.token_ids], device=self.device)

    def sample_rows(self) -> torch.Tensor:
        ends = zip(self.slices, self.firsts[1:], strict=True)
        return torch.tensor([end - 1 for piece, end in ends if piece.sample is not None], device=self.device).long()

    def key_rows(self) -> torch.Tensor:
        blocks = torch.cat([self._blocks_of_tokens(i) for i in range(len(self.slices))])
        heads = torch.arange(self.num_kv_heads)
        rows = (blocks[:, None] * self.num_kv_heads + heads) * self.block_size
        return (rows + (self.positions % self.block_size)[:, None]).flatten().to(self.device)

    def tail_rows(self) -> torch.Tensor:
        heads = torch.arange(self.num_kv_heads)[:, None]
        rows = [torch.empty(0, dtype=torch.int64)]
        for piece in self.slices:
            last, offset = divmod(_end(piece), self.block_size)
            if offset and piece.start <= last * self.block_size:
                block_rows = (piece.block_table[last] * self.num_kv_heads + heads) * self.block_size
                rows.append((block_rows + torch.arange(offset, self.block_size)).flatten())
        return torch.cat(rows).to(self.device)

    def _blocks_of_tokens(self, index: int) -> torch.Tensor:
        first = self.slices[index].start // self.block_size
        table = torch.tensor(self.slices[index].block_table[first : self._last_block(index)])
        return table[self.positions[self.firsts[index] : self.firsts[index + 1]] // self.block_size - first]

    def reads(self, window: int | None) -> Reads:
        num_decodes = sum(len(piece.token_ids) == 1 for piece in self.slices)
        chunks = [self._chunk(i, window) for i in range(num_decodes, len(self.slices))]
        return Reads(decodes=self._decode_groups(num_decodes, window), chunks=chunks)

    def _decode_groups(self, num_decodes: int, window: int | None) -> list[DecodeGroup]:
        """Group neighbours so that none reads more than twice its blocks, and what they read together stays in a cache;
        they are sorted by length."""
        groups: list[DecodeGroup] = []
        first = 0
        lengths = [self._last_block(i) - self._first_block(i, window) for i in range(num_decodes)]
        for last in range(1, num_decodes + 1):
            is_full = last < num_decodes and (last + 1 - first) * lengths[last] > self.max_gathered_blocks
            if last == num_decodes or is_full or lengths[last] > 2 * lengths[first]:
                groups.append(self._decode_group(first, last, max(lengths[first:last]), window))
                first = last
        return groups

    def _decode_group(self, first: int, last: int, length: int, window: int | None) -> DecodeGroup:
        tables, starts = [], []
        for i in range(first, last):
            start = self._first_block(i, window)
            own = self.slices[i].block_table[start : self._last_block(i)]
            tables.append(own + own[:1] * (length - len(own)))
            starts.append(start * self.block_size)
        rows = torch.tensor(tables)[:, None, :] * self.num_kv_heads + torch.arange(self.num_kv_heads)[None, :, None]
        keys = torch.tensor(starts)[:, None] + torch.arange(length * self.block_size)
        hidden = _hidden(self.positions[first:last, None], keys, window)
        return DecodeGroup(first, last, self._keys_and_values(rows), hidden[:, None, None, :].to(self.device))

    def _chunk(self, index: int, window: int | None) -> Chunk:
        piece, first, last = self.slices[index], self.firsts[index], self.firsts[index + 1]
        start = self._first_block(index, window)
        table = torch.tensor(piece.block_table[start : self._last_block(index)])
        rows = table[None, :] * self.num_kv_heads + torch.arange(self.num_kv_heads)[:, None]
        context = _end(piece) - start * self.block_size
        kind = self.device.type
        step = max(1, min(MAX_QUERY_BLOCK[kind], MAX_SCORES[kind] // (self.num_heads * context)))
        blocks = [
            self._query_block(piece.start, start * self.block_size, low, min(low + step, last - first), window)
            for low in range(0, last - first, step)
        ]
        return Chunk(first, last, self._keys_and_values(rows), blocks)

    def _query_block(self, chunk_start: int, origin: int, first: int, last: int, window: int | None) -> QueryBlock:
        """`origin` is the position of the first gathered key."""
        queries = torch.arange(chunk_start + first, chunk_start + last)
        low = 0 if window is None else max(0, chunk_start + first - window + 1 - origin)
        high = chunk_start + last - origin
        partial = chunk_start + first - origin if window is None else low
        hidden = _hidden(queries[:, None], torch.arange(partial, high)[None, :] + origin, window)
        return QueryBlock(first, last, low, high, partial, hidden.to(self.device))

    def _keys_and_values(self, key_rows: torch.Tensor) -> torch.Tensor:
        values = key_rows + self.num_blocks * self.num_kv_heads
        return torch.stack([key_rows, values]).flatten().to(self.device)

    def _first_block(self, index: int, window: int | None) -> int:
        """Return the first block that the slice's first token sees."""
        start = self.slices[index].start
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def _last_block(self, index: int) -> int:
        return -(-_end(self.slices[index]) // self.block_size)


def _hidden(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which key positions each query position must not see: later ones, and those left of its window."""
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)
