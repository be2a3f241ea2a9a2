"""Transfer plans: every needed byte once and no other, for equal and for unequal tensor-parallel sizes."""

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.errors import KvMismatchError
from services.kv.layout import KvLayout
from services.kv.plan import (
    block_moves,
    byte_pieces,
    check_convertible,
    head_slices,
    num_blocks_for,
    num_ready_blocks,
    owned_heads,
    row_indices,
)


def layout_of(total_heads: int, tp_size: int, rank: int = 0, **changes: object) -> KvLayout:
    layout = KvLayout(
        num_layers=2,
        num_kv_heads=max(1, total_heads // tp_size),
        block_size=2,
        head_dim=3,
        dtype="float16",
        itemsize_bytes=2,
        tp_size=tp_size,
        tp_rank=rank,
        total_kv_heads=total_heads,
    )
    return msgspec.structs.replace(layout, **changes)


@given(
    num_tokens=st.integers(1, 200),
    block_size=st.integers(1, 32),
    cached=st.integers(0, 210),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    data=st.data(),
)
def test_chunks_move_each_block_after_the_cached_ones_once_and_in_place(num_tokens, block_size, cached, cuts, data):
    num_blocks = num_blocks_for(num_tokens, block_size)
    skip = min(cached // block_size, num_blocks)
    source = data.draw(st.permutations(range(num_blocks + 3)))[:num_blocks]
    target = data.draw(st.permutations(range(100, 100 + num_blocks + 3)))[: num_blocks - skip]
    moved, first = {}, 0
    for computed in [*sorted(min(cut, num_tokens) for cut in cuts), num_tokens]:
        last = num_ready_blocks(computed, num_tokens, block_size)
        assert last * block_size <= computed or computed == num_tokens
        moves = block_moves(source, target, first=first, last=last, num_skipped_in_target=skip)
        for where, what in zip(moves.target.tolist(), moves.source.tolist(), strict=True):
            assert where not in moved
            moved[where] = what
        first = max(first, last)
    assert moved == {target[number - skip]: source[number] for number in range(skip, num_blocks)}


def test_block_lists_that_cannot_be_right_are_refused():
    with pytest.raises(KvMismatchError):
        block_moves([1, 2], [3, 4], first=0, last=3)
    with pytest.raises(KvMismatchError):
        block_moves([1, 2, 3], [3, 4], first=0, last=3)
    with pytest.raises(KvMismatchError):
        block_moves([1, 2], [3, 3], first=0, last=2)


@given(num_blocks=st.integers(1, 20), data=st.data())
def test_row_indices_name_the_rows_of_the_pool(num_blocks, data):
    layout = layout_of(2, 1)
    blocks = np.array(data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=5)), np.int64)
    pool = np.arange(layout.num_layers * 2 * num_blocks).reshape(layout.num_layers * 2, num_blocks)
    assert pool.reshape(-1)[row_indices(layout, num_blocks, blocks)].tolist() == pool[:, blocks].reshape(-1).tolist()


def pool_of(layout: KvLayout, num_blocks: int, blocks: list[int]) -> np.ndarray:
    """Return a rank's pool in which each element of `blocks` tells layer, k|v, block number, head, token and lane."""
    shape = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    pool = np.full(shape, -1, np.int64)
    for number, block in enumerate(blocks):
        for local, head in enumerate(owned_heads(layout)):
            grid = np.indices((layout.num_layers, 2, layout.block_size, layout.head_dim))
            layer, side, token, lane = grid
            pool[:, :, block, local] = ((((layer * 2 + side) * 50 + number) * 50 + head) * 50 + token) * 50 + lane
    return pool


SIZES = [1, 2, 3, 4, 6, 8, 12, 16]


@pytest.mark.parametrize("total_heads", [1, 2, 3, 4, 6, 8])
def test_each_rank_gets_exactly_its_heads_for_the_whole_matrix_of_tp_sizes(total_heads):
    for _ in range(2):  # a second time into the same pools: nothing may depend on what was there
        for source_size in SIZES:
            for target_size in SIZES:
                divides = [not (total_heads % size and size % total_heads) for size in (source_size, target_size)]
                if all(divides):
                    check_pair(total_heads, source_size, target_size)
                else:
                    with pytest.raises(KvMismatchError):
                        head_slices(layout_of(total_heads, source_size), layout_of(total_heads, target_size))


def check_pair(total_heads: int, source_size: int, target_size: int) -> None:
    source_blocks, target_blocks, cached = [4, 0, 3], [1, 5, 2], 1
    ranks = [layout_of(total_heads, source_size, rank, itemsize_bytes=8) for rank in range(source_size)]
    sources = [pool_of(layout, 5, source_blocks).reshape(-1) for layout in ranks]
    for rank in range(target_size):
        target = layout_of(total_heads, target_size, rank, itemsize_bytes=8)
        got = np.full_like(pool_of(target, 6, []), -1).reshape(-1)
        times_written = np.zeros(got.nbytes, np.int64)
        moves = block_moves(source_blocks, target_blocks, first=cached, last=3)
        for piece in head_slices(ranks[0], target):
            rows = byte_pieces(ranks[piece.source_rank], target, piece, moves, num_source_blocks=5, num_target_blocks=6)
            for source_offset, target_offset, num_bytes in rows.tolist():
                got.view(np.uint8)[target_offset : target_offset + num_bytes] = sources[piece.source_rank].view(
                    np.uint8
                )[source_offset : source_offset + num_bytes]
                times_written[target_offset : target_offset + num_bytes] += 1
        want = pool_of(target, 6, target_blocks)
        want[:, :, target_blocks[:cached]] = -1
        assert np.array_equal(got.reshape(want.shape), want)
        assert set(times_written[(want.reshape(-1) >= 0).repeat(8)]) == {1}
        assert not times_written[(want.reshape(-1) < 0).repeat(8)].any()


def test_replicas_share_the_load():
    source = layout_of(2, 8)
    ranks = {head_slices(source, layout_of(2, 8, rank))[0].source_rank for rank in range(8)}
    assert ranks == set(range(8))


@given(st.sampled_from(["num_layers", "block_size", "head_dim", "dtype", "itemsize_bytes", "total_kv_heads"]))
def test_layouts_that_moving_cannot_convert_are_refused(field):
    ours = layout_of(4, 2)
    theirs = msgspec.structs.replace(ours, **{field: "bfloat16" if field == "dtype" else 8})
    assume(theirs != ours)
    with pytest.raises(KvMismatchError):
        check_convertible(theirs, ours)
    assert theirs.digest() != ours.digest()


def test_impossible_ranks_are_refused():
    for layout in (
        layout_of(4, 2, 2),
        layout_of(4, 2, -1),
        layout_of(4, 2, num_kv_heads=4),
        msgspec.structs.replace(layout_of(4, 1), tp_size=0),
    ):
        with pytest.raises(KvMismatchError):
            owned_heads(layout)
