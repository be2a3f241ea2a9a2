"""Whatever is lost, doubled or late between a worker's cache and a router's index, the index ends up as the cache."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import Epoch, WorkerId
from schemas.kv_events import KvChange, KvCleared, KvEvents, KvRemoved, KvSnapshot, KvStored
from services.router.kv_feed import KvFeed, names_of
from services.router.prefix_index import PrefixIndex

W = WorkerId("w")
BLOCKS = range(2, 10)


def packed(*names: int) -> bytes:
    return np.array(names, dtype="<u8").tobytes()


class Cache:
    """A worker's cache and the messages about it."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = Epoch(epoch)
        self.held: set[int] = set()
        self.last_id = 0

    def change(self, *changes: KvChange) -> KvEvents:
        first_id, self.last_id = self.last_id + 1, self.last_id + len(changes)
        for change in changes:
            if isinstance(change, KvStored):
                self.held |= set(names_of(change.blocks).tolist())
            elif isinstance(change, KvRemoved):
                self.held -= set(names_of(change.blocks).tolist())
            else:
                self.held.clear()
        return KvEvents(worker_id=W, epoch=self.epoch, first_id=first_id, changes=changes)

    def part(self, part: int = 0, num_parts: int = 1) -> KvSnapshot:
        names = sorted(one for one in self.held if one % num_parts == part)
        return KvSnapshot(
            worker_id=W, epoch=self.epoch, last_id=self.last_id, blocks=packed(*names), num_parts=num_parts
        )


def held_in(index: PrefixIndex) -> set[int]:
    return {one for one in BLOCKS if index.match(np.array([one], dtype=np.uint64))}


def followed() -> tuple[KvFeed, PrefixIndex, Cache]:
    feed, index, cache = KvFeed(), PrefixIndex(256), Cache()
    feed.follow(W, cache.epoch, index)
    return feed, index, cache


def stored(*names: int) -> KvStored:
    return KvStored(parent=0, blocks=packed(*names))


def test_a_new_worker_is_asked_for_a_snapshot_and_its_events_wait() -> None:
    feed, index, cache = followed()
    assert feed.missing() == [W]
    cache.change(stored(2))
    snapshot = cache.part()
    feed.on_events(cache.change(stored(3)))
    assert held_in(index) == set()
    assert feed.on_snapshot(snapshot, 0)
    assert held_in(index) == {2, 3}
    assert feed.missing() == []
    feed.on_events(cache.change(KvRemoved(blocks=packed(2))))
    assert held_in(index) == {3}


def test_a_gap_asks_for_a_snapshot() -> None:
    feed, index, cache = followed()
    feed.on_snapshot(cache.part(), 0)
    cache.change(stored(2))
    feed.on_events(cache.change(stored(3)))
    assert feed.missing() == [W]
    assert feed.num_gaps == 1
    feed.on_snapshot(cache.part(), 0)
    assert held_in(index) == {2, 3}


def test_a_loss_that_nothing_follows_shows_in_a_load_report() -> None:
    feed, _, cache = followed()
    feed.on_snapshot(cache.part(), 0)
    feed.on_last_id(W, cache.epoch, 0)
    assert feed.missing() == []
    cache.change(stored(2))
    feed.on_last_id(W, cache.epoch, cache.last_id)
    assert feed.missing() == [W]


def test_a_new_epoch_begins_empty_and_old_messages_are_dropped() -> None:
    feed, index, cache = followed()
    feed.on_snapshot(cache.part(), 0)
    feed.on_events(cache.change(stored(2)))
    again = Cache(epoch=2)
    feed.follow(W, again.epoch, index)
    assert held_in(index) == set()
    assert not feed.on_snapshot(cache.part(), 0)
    feed.on_events(cache.change(stored(4)))
    assert feed.on_snapshot(again.part(), 0)
    feed.on_events(again.change(stored(5)))
    assert held_in(index) == {5}
    feed.follow(W, cache.epoch, index)
    assert held_in(index) == {5}


def test_a_worker_that_left_is_in_no_index() -> None:
    feed, index, cache = followed()
    feed.on_snapshot(cache.part(), 0)
    feed.on_events(cache.change(stored(2)))
    feed.forget(W)
    assert held_in(index) == set()
    feed.on_events(cache.change(stored(3)))
    assert held_in(index) == set()


def test_parts_of_different_moments_make_one_truth() -> None:
    feed, index, cache = followed()
    cache.change(stored(2, 3, 4, 5))
    first = cache.part(0, 2)
    feed.on_events(cache.change(KvRemoved(blocks=packed(2)), stored(6)))
    assert not feed.on_snapshot(first, 0)
    second = cache.part(1, 2)
    feed.on_events(cache.change(KvRemoved(blocks=packed(3))))
    assert feed.on_snapshot(second, 1)
    assert held_in(index) == cache.held == {4, 5, 6}


changes = st.one_of(
    st.sets(st.sampled_from(BLOCKS), min_size=1).map(lambda names: stored(*sorted(names))),
    st.sets(st.sampled_from(BLOCKS), min_size=1).map(lambda names: KvRemoved(blocks=packed(*sorted(names)))),
    st.just(KvCleared()),
)
steps = st.lists(
    st.tuples(
        st.lists(changes, min_size=1, max_size=3),
        st.sampled_from(["comes", "comes", "comes", "is lost", "comes twice", "snapshot", "snapshot in parts"]),
    ),
    max_size=25,
)


@given(steps)
@settings(deadline=None)
def test_after_any_losses_one_report_and_one_snapshot_heal_the_index(
    script: list[tuple[list[KvChange], str]],
) -> None:
    feed, index, cache = followed()
    parts: list[KvSnapshot] = []
    for several, fate in script:
        if fate == "snapshot" and feed.missing():
            feed.on_snapshot(cache.part(), 0)
        if fate == "snapshot in parts":
            parts.append(cache.part(len(parts) % 3, 3))
            if len(parts) == 3:
                for number, part in enumerate(parts):
                    feed.on_snapshot(part, number)
                parts.clear()
        events = cache.change(*several)
        if fate != "is lost":
            feed.on_events(events)
        if fate == "comes twice":
            feed.on_events(events)
    feed.on_last_id(W, cache.epoch, cache.last_id)
    if feed.missing():
        feed.on_snapshot(cache.part(), 0)
    assert not feed.missing()
    assert held_in(index) == cache.held
