"""BlockManager against a model that keeps every reference by name."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engines.paged.blocks import BlockManager, PoolExhaustedError
from services.engines.paged.hashing import extend_hashes, root_hash

NUM_BLOCKS = 8
HASHES = [bytes([i]) * 32 for i in range(4)]


class BlocksMachine(RuleBasedStateMachine):
    """`holders`: block lists of live owners; `aside`: of quarantined attempts; `names`: hash by block, LRU `idle`."""

    def __init__(self) -> None:
        super().__init__()
        self.real = BlockManager(NUM_BLOCKS)
        self.holders: dict[int, list[int]] = {}
        self.aside: dict[str, list[int]] = {}
        self.names: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.next_holder = 0

    def held(self) -> Counter[int]:
        return Counter(b for blocks in self.holders.values() for b in blocks)

    def set_aside(self) -> Counter[int]:
        return Counter(b for blocks in self.aside.values() for b in blocks)

    def rest(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if not self.held()[block] and not self.set_aside()[block] and block in self.names:
                self.idle.append(block)

    @rule(num_new=st.integers(0, NUM_BLOCKS + 1), start=st.integers(0, len(HASHES) - 1), length=st.integers(0, 4))
    def take(self, num_new: int, start: int, length: int) -> None:
        wanted = HASHES[start : start + length]
        hits = self.real.match(wanted, max_blocks=3)
        by_hash = {name: block for block, name in self.names.items()}
        expected = []
        for name in wanted[:3]:
            if name not in by_hash:
                break
            expected.append(by_hash[name])
        assert hits == expected
        unused = [b for b in range(NUM_BLOCKS) if not self.held()[b] and not self.set_aside()[b]]
        fits = num_new <= len([b for b in unused if b not in hits])
        assert self.real.can_take(hits, num_new) == fits
        if not fits:
            with pytest.raises(PoolExhaustedError):
                self.real.take(hits, num_new)
            return
        blocks = self.real.take(hits, num_new)
        fresh = blocks[len(hits) :]
        assert blocks[: len(hits)] == hits
        assert len(set(fresh)) == num_new
        assert set(fresh) <= set(unused) - set(hits)
        self.idle = [b for b in self.idle if b not in hits]
        evicted = [b for b in fresh if b in self.names]
        assert evicted == self.idle[: len(evicted)], "the least recently used go first"
        assert not evicted or not any(b not in self.names for b in set(unused) - set(fresh)), "free ones go before"
        for block in evicted:
            del self.names[block]
        self.idle = self.idle[len(evicted) :]
        self.holders[self.next_holder] = blocks
        self.next_holder += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        blocks = self.holders[data.draw(st.sampled_from(sorted(self.holders)))]
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.real.publish(block, name)
            if name not in self.names.values() and block not in self.names:
                self.names[block] = name

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.sampled_from(sorted(self.holders))))
        self.real.release(blocks)
        self.rest(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), attempt=st.sampled_from("abc"))
    def quarantine(self, data: st.DataObject, attempt: str) -> None:
        blocks = self.holders.pop(data.draw(st.sampled_from(sorted(self.holders))))
        self.real.quarantine(attempt, blocks)
        self.aside.setdefault(attempt, []).extend(blocks)

    @rule(attempt=st.sampled_from("abc"))
    def settle(self, attempt: str) -> None:
        self.real.settle(attempt)
        blocks = self.aside.pop(attempt, [])
        for index in reversed(range(len(blocks))):
            if blocks[index] not in blocks[:index]:
                self.rest([blocks[index]])

    @invariant()
    def counts_add_up(self) -> None:
        held, aside = self.held(), self.set_aside()
        used = {b for b in held if held[b]}
        assert self.real.num_used == len(used)
        assert self.real.num_quarantined == len({b for b in aside if aside[b]} - used)
        assert self.real.num_cached == len(self.idle)
        total = self.real.num_used + self.real.num_cached + self.real.num_free + self.real.num_quarantined
        assert total == NUM_BLOCKS


BlocksMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlocksAgainstTheNaiveModel = BlocksMachine.TestCase


def hashes_of(ids: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(salt), ids, 4)
    return hashes


def test_a_block_hash_depends_on_all_ids_before_it_and_on_the_salt() -> None:
    ids = list(range(12))
    assert len(hashes_of(ids)) == len(hashes_of([*ids, 1])) == 3
    assert hashes_of([99, *ids[1:]])[2] != hashes_of(ids)[2]
    assert set(hashes_of(ids, "tenant a")).isdisjoint(hashes_of(ids, "tenant b"))


def test_hashes_extended_piece_by_piece_equal_those_made_at_once() -> None:
    ids = list(range(100, 131))
    grown: list[bytes] = []
    for end in range(0, len(ids) + 1, 3):
        extend_hashes(grown, root_hash("s"), ids[:end], 4)
    extend_hashes(grown, root_hash("s"), ids, 4)
    assert grown == hashes_of(ids, "s")


def test_the_tail_of_a_released_prompt_is_evicted_before_its_head() -> None:
    blocks = BlockManager(3)
    taken = blocks.take((), 3)
    for block, name in zip(taken, HASHES, strict=False):
        blocks.publish(block, name)
    blocks.release(taken)
    blocks.take((), 1)
    assert blocks.match(HASHES[:3], 3) == taken[:2]
