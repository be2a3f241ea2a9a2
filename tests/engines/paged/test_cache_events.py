"""What the block manager tells of its prefix cache is what is in it."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.kv_events import KvRemoved, KvStored
from services.engines.paged.blocks import BlockManager
from services.engines.paged.cache_log import CacheLog
from services.engines.paged.hashing import extend_hashes, root_hash
from services.prefix_hash import block_hashes, chain
from services.prefix_hash import root_hash as root_name

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def names_in(blocks: bytes) -> list[int]:
    return np.frombuffer(blocks, dtype="<u8").tolist()


def hashes_of(ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(""), ids, BLOCK_SIZE)
    return hashes


class ToldAndHeld(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.told: set[int] = set()
        self.prompts: dict[bytes, int] = {}

    @rule(beginning=st.integers(0, 2), end=st.integers(0, 3), length=st.integers(1, 5))
    def compute(self, beginning: int, end: int, length: int) -> None:
        ids = [beginning] * 8 + [end] * (4 * length)
        hashes = hashes_of(ids)
        names = [root_name(""), *chain(root_name(""), ids, BLOCK_SIZE)]
        self.prompts |= dict(zip(hashes, names[1:], strict=True))
        hits = self.blocks.match(hashes, len(hashes))
        if not self.blocks.can_take(hits, len(hashes) - len(hits)):
            return
        table = self.blocks.take(hits, len(hashes) - len(hits))
        for index in range(len(hits), len(table)):
            self.blocks.publish(table[index], hashes[index], names[index + 1], names[index])
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.blocks.release(self.held.pop(which % len(self.held)))

    @invariant()
    def what_is_told_is_held(self) -> None:
        for change in self.blocks.log.take():
            if isinstance(change, KvStored):
                new = names_in(change.blocks)
                assert not self.told & set(new)
                assert len(set(new)) == len(new)
                self.told |= set(new)
            else:
                assert isinstance(change, KvRemoved)
                gone = names_in(change.blocks)
                assert self.told >= set(gone)
                self.told -= set(gone)
        assert self.told == {name for one, name in self.prompts.items() if self.blocks.match([one], 1)}


TestToldAndHeld = ToldAndHeld.TestCase
TestToldAndHeld.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_that_follow_one_another_are_one_change() -> None:
    log = CacheLog()
    for parent, name in ((1, 2), (2, 3), (3, 4), (9, 10)):
        log.stored(parent, name)
    log.removed(3)
    log.removed(4)
    log.stored(3, 4)
    told = log.take()
    assert [type(change).__name__ for change in told] == ["KvStored", "KvStored", "KvRemoved", "KvStored"]
    first, second, gone, _ = told
    assert isinstance(first, KvStored)
    assert (first.parent, names_in(first.blocks)) == (1, [2, 3, 4])
    assert isinstance(second, KvStored)
    assert (second.parent, names_in(second.blocks)) == (9, [10])
    assert isinstance(gone, KvRemoved)
    assert names_in(gone.blocks) == [3, 4]
    assert log.take() == ()


def test_a_worker_and_a_router_call_a_block_the_same() -> None:
    ids = list(range(50, 150))
    assert chain(root_name("salt"), ids, 16) == block_hashes(tuple(ids), 16, "salt").tolist()
