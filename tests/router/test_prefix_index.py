"""The prefix index says what a naive dictionary of sets says, within its memory."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.ids import WorkerId
from services.prefix_hash import BlockHashes, block_hashes, chain, root_hash
from services.router.prefix_index import NUM_WAYS, PrefixIndex
from services.router.routed_prefixes import RoutedPrefixes

WORKERS = [WorkerId(f"w{index}") for index in range(5)]
# A small tree of prompts: shared beginnings, different ends, ids 0 … 2^64-1 (0 and 1 collide as table keys only).
PROMPTS = [
    np.array([2, 3, 4, 5, 6, 7], dtype=np.uint64),
    np.array([2, 3, 4, 8, 9], dtype=np.uint64),
    np.array([2, 3, 10], dtype=np.uint64),
    np.array([0, 11, 2**64 - 1], dtype=np.uint64),
    np.concatenate([np.array([2, 3, 4], dtype=np.uint64), np.arange(100, 400, dtype=np.uint64)]),
]
prompts = st.sampled_from(PROMPTS)
workers = st.sampled_from(WORKERS)


def naive_match(held: dict[WorkerId, set[int]], hashes: BlockHashes) -> dict[WorkerId, int]:
    found = {}
    for worker, blocks in held.items():
        depth = 0
        while depth < len(hashes) and int(hashes[depth]) in blocks:
            depth += 1
        if depth:
            found[worker] = depth
    return found


class IndexBesideSets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(4096, max_tick=9)
        self.held: dict[WorkerId, set[int]] = {}

    @rule(worker=workers, prompt=prompts, start=st.integers(0, 8), end=st.integers(0, 400))
    def stored(self, worker: WorkerId, prompt: BlockHashes, start: int, end: int) -> None:
        self.index.stored(worker, prompt[start:end])
        self.held.setdefault(worker, set()).update(prompt[start:end].tolist())

    @rule(worker=workers, prompt=prompts, start=st.integers(0, 8), end=st.integers(0, 400))
    def removed(self, worker: WorkerId, prompt: BlockHashes, start: int, end: int) -> None:
        self.index.removed(worker, prompt[start:end])
        self.held.get(worker, set()).difference_update(prompt[start:end].tolist())

    @rule(worker=workers)
    def cleared(self, worker: WorkerId) -> None:
        self.index.cleared(worker)
        self.held.pop(worker, None)

    @rule(worker=workers)
    def gone(self, worker: WorkerId) -> None:
        self.index.forget(worker)
        self.held.pop(worker, None)

    @invariant()
    def every_prompt_matches_as_in_the_sets(self) -> None:
        for prompt in PROMPTS:
            assert self.index.match(prompt) == naive_match(self.held, prompt)
        assert self.index.num_blocks == len(set().union(*self.held.values()))


TestIndexBesideSets = IndexBesideSets.TestCase
TestIndexBesideSets.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_full_index_keeps_its_cap_and_forgets_the_least_recently_used() -> None:
    index = PrefixIndex(64)
    rng = np.random.default_rng(1)
    kept = rng.integers(1, 2**63, 8, dtype=np.uint64)
    index.stored(WORKERS[0], kept)
    for _ in range(50):
        index.stored(WORKERS[1], rng.integers(1, 2**63, 40, dtype=np.uint64))
        assert index.match(kept) == {WORKERS[0]: 8}
    assert index.num_blocks <= 2 * NUM_WAYS
    for _ in range(50):
        index.stored(WORKERS[1], rng.integers(1, 2**63, 40, dtype=np.uint64))
    assert index.match(kept) == {}


def test_one_call_larger_than_the_index_leaves_it_sound() -> None:
    index = PrefixIndex(64)
    hashes = np.arange(1, 1001, dtype=np.uint64)
    index.stored(WORKERS[0], hashes)
    assert 0 < index.num_blocks <= 2 * NUM_WAYS
    index.removed(WORKERS[0], hashes)
    assert index.num_blocks == 0
    assert index.num_holder_sets == 0


def test_below_its_cap_the_index_loses_nothing() -> None:
    index, hashes = PrefixIndex(20_000), block_hashes(range(160_000), 8)
    for start in range(0, len(hashes), 500):
        index.stored(WORKERS[0], hashes[start : start + 500])
    assert index.match(hashes) == {WORKERS[0]: 20_000}


def test_memory_is_thirty_two_bytes_a_block() -> None:
    assert PrefixIndex(1 << 20).nbytes == 32 << 20


def test_workers_that_come_and_go_take_turns_at_the_same_bits() -> None:
    index, hashes = PrefixIndex(64), np.arange(1, 5, dtype=np.uint64)
    for number in range(200):
        index.stored(WorkerId(f"short-lived {number}"), hashes)
        assert index.match(hashes) == {WorkerId(f"short-lived {number}"): 4}
        index.forget(WorkerId(f"short-lived {number}"))
    assert index.match(hashes) == {}


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200), st.integers(1, 17), st.integers(0, 200))
@settings(deadline=None)
def test_hashes_of_a_longer_prompt_begin_with_those_of_its_prefix(ids: list[int], block_size: int, cut: int) -> None:
    whole = block_hashes(tuple(ids), block_size)
    assert len(whole) == len(ids) // block_size
    part = block_hashes(tuple(ids[:cut]), block_size)
    assert whole[: len(part)].tolist() == part.tolist()
    grown = chain(int(part[-1]) if len(part) else root_hash(""), ids[len(part) * block_size :], block_size)
    assert [*part.tolist(), *grown] == whole.tolist()
    assert block_hashes(np.array(ids, dtype=np.uint32), block_size).tolist() == whole.tolist()


def test_another_salt_shares_nothing() -> None:
    index, ids = PrefixIndex(1024), tuple(range(256))
    index.stored(WORKERS[0], block_hashes(ids, 16, "tenant a"))
    assert index.match(block_hashes(ids, 16, "tenant a")) == {WORKERS[0]: 16}
    assert index.match(block_hashes(ids, 16, "tenant b")) == {}
    assert index.match(block_hashes(ids, 16)) == {}


class RoutedBesideList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.routed = RoutedPrefixes(2000, ttl_s=10.0)
        self.notes: dict[int, tuple[WorkerId, BlockHashes, float]] = {}
        self.now, self.key = 0.0, 0

    @rule(worker=workers, prompt=prompts, end=st.integers(0, 400), later=st.floats(0, 4))
    def note(self, worker: WorkerId, prompt: BlockHashes, end: int, later: float) -> None:
        self.now, self.key = self.now + later, self.key + 1
        self.routed.note(self.key, worker, prompt[:end], self.now)
        self.notes[self.key] = (worker, prompt[:end], self.now + 10.0)
        while sum(len(hashes) for _, hashes, _ in self.notes.values()) > 2000:
            del self.notes[min(self.notes)]

    @rule(back=st.integers(0, 5))
    def settle(self, back: int) -> None:
        self.routed.settle(self.key - back)
        self.notes.pop(self.key - back, None)

    @rule(later=st.floats(0, 15))
    def expire(self, later: float) -> None:
        self.now += later
        self.routed.expire(self.now)
        self.notes = {key: one for key, one in self.notes.items() if one[2] > self.now}

    @rule(worker=workers)
    def gone(self, worker: WorkerId) -> None:
        self.routed.forget(worker)
        self.notes = {key: one for key, one in self.notes.items() if one[0] != worker}

    @invariant()
    def every_prompt_matches_as_in_the_list(self) -> None:
        held: dict[WorkerId, set[int]] = {}
        for worker, hashes, _ in self.notes.values():
            held.setdefault(worker, set()).update(hashes.tolist())
        for prompt in PROMPTS:
            assert self.routed.match(prompt) == naive_match(held, prompt)
        assert len(self.routed) == len(self.notes)


TestRoutedBesideList = RoutedBesideList.TestCase
TestRoutedBesideList.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_a_prompt_without_a_full_block_settles_after_the_last_one_with_blocks() -> None:
    routed = RoutedPrefixes(100, ttl_s=10.0)
    routed.note(1, WORKERS[0], np.array([], dtype=np.uint64), 0.0)
    routed.note(2, WORKERS[0], np.array([5, 6], dtype=np.uint64), 0.0)
    routed.settle(2)
    routed.settle(1)
    assert len(routed) == 0
