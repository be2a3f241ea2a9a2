"""The names told are those of the blocks cached, whoever holds them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schemas.kv_events import KvChange, KvRemoved, KvStored
from services.engines.adapter.cache_names import CacheNames
from services.prefix_hash import chain, root_hash

ROOT = root_hash("")
STEPS = st.lists(st.tuples(st.sampled_from(("store", "remove", "clear")), st.integers(0, 1), st.integers(0, 3)))


def follow(told: set[int], changes: tuple[KvChange, ...]) -> None:
    """Do what a router's index does, which takes no block twice."""
    for change in changes:
        match change:
            case KvStored():
                new = set(np.frombuffer(change.blocks, "<u8").tolist())
                assert not new & told
                told |= new
            case KvRemoved():
                gone = set(np.frombuffer(change.blocks, "<u8").tolist())
                assert gone <= told
                told -= gone
            case _:
                told.clear()


@given(STEPS, st.integers(1, 5))
def test_what_is_told_is_what_has_a_holder(steps: list[tuple[str, int, int]], stride: int) -> None:
    """Keys (rank, block) of two ranks lead to the same names."""
    names, held, told = CacheNames(2), set[tuple[int, int]](), set[int]()
    for number, (verb, rank, block) in enumerate(steps):
        key = (rank, block)
        match verb:
            case "store":
                assert names.store(key, ROOT, (block, 9)) == chain(ROOT, (block, 9), 2)[0]
                held.add(key)
            case "remove":
                names.remove(key)
                held.discard(key)
            case _:
                names.clear()
                held.clear()
        assert (names.name_of(key) is not None) == (key in held)
        assert names.num_blocks == len(held)
        if number % stride == 0:
            follow(told, names.take())
    follow(told, names.take())
    assert told == {chain(ROOT, (block, 9), 2)[0] for _, block in held}
