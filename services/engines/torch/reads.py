"""What attention reads in one step, for each kind of slice."""

from typing import Any, NamedTuple

import torch

from services.engines.torch.step import StepSlices, first_seen, hidden

MAX_QUERY_BLOCK = {"cpu": 256, "cuda": 1024}
MAX_SCORES = {"cpu": 2**24, "cuda": 2**26}  # of one query block, over all heads
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


class DecodeTables(NamedTuple):
    """The step's first n tokens, one a sequence: each reads tokens [firsts, lasts) (int64 [n]) of the blocks in its
    row of `tables` (int32 [n, most blocks]). On the CPU."""

    tables: torch.Tensor
    firsts: torch.Tensor
    lasts: torch.Tensor


class QueryBlock(NamedTuple):
    """Queries [first, last) of a chunk against gathered keys [low, high). `mask` [last - first, high - low] is added
    to the scores: 0, or -inf for what a query must not see. None: the two are the same tokens, each sees those up to
    itself."""

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None


class Chunk(NamedTuple):
    """Tokens [first, last) of the step, of one sequence; `rows` [2 * heads * blocks] of the pool's block rows."""

    first: int
    last: int
    rows: torch.Tensor
    query_blocks: list[QueryBlock]


class Reads(NamedTuple):
    """What attention reads under one window; `decodes` in the form that the operators want."""

    decodes: Any
    chunks: list[Chunk]


def decode_tables(step: StepSlices, window: int | None) -> DecodeTables:
    """Return what the decoding sequences read, by their own block tables."""
    decodes = step.slices[: step.num_decodes]
    tables = [piece.block_table[: step.last_block(i)] for i, piece in enumerate(decodes)]
    width = max(map(len, tables), default=0)
    return DecodeTables(
        tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        firsts=torch.tensor([first_seen(piece.start, window) for piece in decodes], dtype=torch.int64),
        lasts=torch.tensor([piece.end for piece in decodes], dtype=torch.int64),
    )


def decode_groups(step: StepSlices, window: int | None) -> list[DecodeGroup]:
    """Group neighbours so that none reads more than twice its blocks, and what they read together stays in a cache;
    they are sorted by length."""
    groups: list[DecodeGroup] = []
    first = 0
    max_gathered_blocks = max(1, MAX_GATHERED_BYTES[step.device.type] // (2 * step.layout.row_bytes))
    lengths = [step.last_block(i) - step.first_block(i, window) for i in range(step.num_decodes)]
    for last in range(1, step.num_decodes + 1):
        is_full = last < step.num_decodes and (last + 1 - first) * lengths[last] > max_gathered_blocks
        if last == step.num_decodes or is_full or lengths[last] > 2 * lengths[first]:
            groups.append(_decode_group(step, first, last, max(lengths[first:last]), window))
            first = last
    return groups


def _decode_group(step: StepSlices, first: int, last: int, length: int, window: int | None) -> DecodeGroup:
    tables, starts = [], []
    for i in range(first, last):
        start = step.first_block(i, window)
        own = step.slices[i].block_table[start : step.last_block(i)]
        tables.append(own + own[:1] * (length - len(own)))
        starts.append(start * step.layout.block_size)
    keys = torch.tensor(starts)[:, None] + torch.arange(length * step.layout.block_size)
    unseen = hidden(step.positions[first:last, None], keys, window)[:, None, None, :].to(step.device)
    return DecodeGroup(first, last, step.keys_and_values(step.block_rows(torch.tensor(tables))), unseen)


def read_chunk(step: StepSlices, index: int, window: int | None) -> Chunk:
    """Return what a chunk of a prompt reads."""
    piece, first, last = step.slices[index], step.firsts[index], step.firsts[index + 1]
    start = step.first_block(index, window)
    rows = step.block_rows(torch.tensor(piece.block_table[start : step.last_block(index)]))
    if piece.start == 0 and window is None:
        blocks = [QueryBlock(0, last - first, 0, last - first, None)]
    else:
        origin = start * step.layout.block_size
        size = _query_block_size(step, piece.end - origin)
        blocks = [
            _query_block(step, piece.start, origin, low, min(low + size, last - first), window)
            for low in range(0, last - first, size)
        ]
    return Chunk(first, last, step.keys_and_values(rows), blocks)


def _query_block_size(step: StepSlices, context: int) -> int:
    kind = step.device.type
    return max(1, min(MAX_QUERY_BLOCK[kind], MAX_SCORES[kind] // (step.num_heads * context)))


def _query_block(
    step: StepSlices, chunk_start: int, origin: int, first: int, last: int, window: int | None
) -> QueryBlock:
    """`origin` is the position of the first gathered key."""
    queries = torch.arange(chunk_start + first, chunk_start + last)
    low, high = max(0, first_seen(chunk_start + first, window) - origin), chunk_start + last - origin
    unseen = hidden(queries[:, None], torch.arange(low, high)[None, :] + origin, window)
    mask = torch.zeros(unseen.shape, dtype=getattr(torch, step.layout.dtype)).masked_fill_(unseen, float("-inf"))
    return QueryBlock(first, last, low, high, mask.to(step.device))
