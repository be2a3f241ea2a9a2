"""The rolling state: however a sequence is cut into chunks, the rows are the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engines.sim.arithmetic import MASK, mix, mix_array, next_state, next_states

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200)


@settings(max_examples=100, deadline=None)
@given(ids=ids, cuts=st.lists(st.integers(1, 60), max_size=12))
def test_chunks_of_any_size_give_the_states_of_one_token_after_the_other(ids: list[int], cuts: list[int]) -> None:
    one_by_one, state, previous = [], 0, None
    for token_id in ids:
        state = next_state(state, previous, token_id)
        previous = token_id
        one_by_one.append(state)
    chunked: list[int] = []
    for size in [*cuts, len(ids)]:
        piece = np.array(ids[len(chunked) : len(chunked) + size], dtype=np.uint64)
        if len(piece):
            start = len(chunked)
            found = next_states(chunked[-1] if start else 0, ids[start - 1] if start else None, piece)
            chunked += [int(x) for x in found]
    assert chunked == one_by_one


@given(st.integers(0, MASK))
def test_mix_is_the_same_for_numbers_and_arrays(x: int) -> None:
    assert int(mix_array(np.array([x], dtype=np.uint64))[0]) == mix(x)


@given(ids=ids, index=st.integers(0, 199), other=st.integers(0, 2**31 - 1))
def test_any_other_id_anywhere_gives_another_state(ids: list[int], index: int, other: int) -> None:
    changed = list(ids)
    changed[index % len(ids)] = other
    first, second = (next_states(0, None, np.array(x, dtype=np.uint64))[-1] for x in (ids, changed))
    assert (first == second) == (changed == ids)
