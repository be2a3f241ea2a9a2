"""Which bytes a KV handoff moves: pure functions of two layouts and two block lists.

Equal layouts move whole rows, which is what services.kv.transfer does. Between different tensor-parallel sizes each
target rank takes exactly its heads' slices (`head_slices`, `byte_pieces`); head-major pools make each one piece.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import KvMismatchError
from services.kv.layout import KvLayout
from services.kv.transfer import BlockIds


class BlockMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of blocks: source[i] of one pool goes to target[i] of the other."""

    source: BlockIds
    target: BlockIds

    def __len__(self) -> int:
        return len(self.source)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // block_size)


def num_ready_blocks(num_computed_tokens: int, num_tokens: int, block_size: int) -> int:
    """Return how many of a prompt's first blocks will not change any more: the full ones; all once it is done."""
    if num_computed_tokens >= num_tokens:
        return num_blocks_for(num_tokens, block_size)
    return num_computed_tokens // block_size


def block_moves(
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    *,
    first: int,
    last: int,
    num_skipped_in_target: int = 0,
) -> BlockMoves:
    """Return the moves of the prompt's blocks number `first` … `last`-1.

    `source_blocks` hold the prompt from its block 0 on, `target_blocks` from block `num_skipped_in_target` on: those
    before it are the target's own cached prefix and never written. Raises KvMismatchError when a list is too short
    or names a block twice (two blocks of a prompt in one place can't both be right).
    """
    start = max(first, num_skipped_in_target)
    if start >= last:
        return BlockMoves(source=np.empty(0, np.int64), target=np.empty(0, np.int64))
    source = np.asarray(source_blocks[start:last], np.int64)
    target = np.asarray(target_blocks[start - num_skipped_in_target : last - num_skipped_in_target], np.int64)
    if len(source) != last - start or len(target) != last - start:
        raise KvMismatchError(
            f"blocks {start} to {last - 1} are needed, source has {len(source)}, target {len(target)}"
        )
    if len(np.unique(target)) != len(target):
        raise KvMismatchError("a target block is named twice")
    return BlockMoves(source=source, target=target)


def row_indices(layout: KvLayout, num_blocks: int, blocks: BlockIds) -> npt.NDArray[np.int32]:
    """Return the rows of these blocks in a pool of [num_layers x 2, num_blocks] rows, row-major by (layer, k|v)."""
    bases = np.arange(layout.num_layers * 2, dtype=np.int64) * num_blocks
    return (bases[:, None] + blocks[None, :]).reshape(-1).astype(np.int32)


class HeadSlice(msgspec.Struct, frozen=True, kw_only=True):
    """`num_heads` heads: from `source_head` of rank `source_rank` to `target_head` of the target (rank-local)."""

    source_rank: int
    source_head: int
    target_head: int
    num_heads: int


def owned_heads(layout: KvLayout) -> range:
    """Return the model's KV heads that this rank holds. Raises KvMismatchError for an impossible layout."""
    total = _total_heads(layout)
    tp_size = layout.tp_size
    if tp_size <= 0 or not 0 <= layout.tp_rank < tp_size or total <= 0:
        raise KvMismatchError(f"no such rank: {layout.tp_rank} of {tp_size} with {total} KV heads")
    if total % tp_size and tp_size % total:
        raise KvMismatchError(f"{total} KV heads don't divide over {tp_size} ranks")
    num_heads = max(1, total // tp_size)
    if layout.num_kv_heads != num_heads:
        raise KvMismatchError(f"a rank of {tp_size} holds {num_heads} of {total} KV heads, not {layout.num_kv_heads}")
    first = layout.tp_rank * total // tp_size
    return range(first, first + num_heads)


def check_convertible(source: KvLayout, target: KvLayout) -> None:
    """Raise KvMismatchError unless the source's KV can become the target's by moving bytes alone."""
    theirs, ours = msgspec.structs.asdict(source), msgspec.structs.asdict(target)
    for name in ("num_layers", "block_size", "head_dim", "dtype", "itemsize_bytes"):
        if ours[name] != theirs[name]:
            raise KvMismatchError(f"{name}: {theirs[name]} at the source, {ours[name]} at the target", param=name)
    if _total_heads(source) != _total_heads(target):
        raise KvMismatchError(f"{_total_heads(source)} KV heads at the source, {_total_heads(target)} at the target")
    owned_heads(source)
    owned_heads(target)


def head_slices(source: KvLayout, target: KvLayout) -> tuple[HeadSlice, ...]:
    """Return which heads of which source ranks a target rank takes, each of its heads once.

    `source` is the layout of any rank of the source. Where source ranks hold replicas of a head (more ranks than
    heads), target ranks are spread over them.
    """
    check_convertible(source, target)
    heads = owned_heads(target)
    num_replicas = max(1, source.tp_size // _total_heads(source))
    heads_per_rank = source.num_kv_heads
    slices = []
    head = heads.start
    while head < heads.stop:
        group = head // heads_per_rank
        end = min(heads.stop, (group + 1) * heads_per_rank)
        slices.append(
            HeadSlice(
                source_rank=group * num_replicas + target.tp_rank % num_replicas,
                source_head=head - group * heads_per_rank,
                target_head=head - heads.start,
                num_heads=end - head,
            )
        )
        head = end
    return tuple(slices)


def byte_pieces(
    source: KvLayout,
    target: KvLayout,
    head_slice: HeadSlice,
    moves: BlockMoves,
    *,
    num_source_blocks: int,
    num_target_blocks: int,
) -> npt.NDArray[np.int64]:
    """Return [n, 3] rows (source offset, target offset, bytes), offsets from the start of each rank's pool.

    One row per (layer, k|v, block): n = num_layers x 2 x len(moves).
    """
    source_rows = row_indices(source, num_source_blocks, moves.source).astype(np.int64)
    target_rows = row_indices(target, num_target_blocks, moves.target).astype(np.int64)
    pieces = np.empty((len(source_rows), 3), np.int64)
    pieces[:, 0] = source_rows * source.row_bytes + head_slice.source_head * source.head_bytes
    pieces[:, 1] = target_rows * target.row_bytes + head_slice.target_head * target.head_bytes
    pieces[:, 2] = head_slice.num_heads * source.head_bytes
    return pieces


def pool_bytes(layout: KvLayout, num_blocks: int) -> int:
    """Return the size of one rank's pool in bytes."""
    return layout.block_bytes * num_blocks


def _total_heads(layout: KvLayout) -> int:
    return layout.total_kv_heads or layout.num_kv_heads * layout.tp_size
