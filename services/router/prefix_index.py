"""Which workers have which prompt blocks in their caches. Pure: no I/O, no clock; step 2 of the walk asks it.

Memory is fixed at the start: NUM_WAYS slots a bucket, 16 bytes a slot (hash 8, set of holders 4, last use 4), twice
as many slots as blocks may be known, so 32 bytes a block at the cap; the sets of holders come on top, one for each
different set in use (holder_sets.py). A bucket that is full gives up its least recently used block. At half load a
bucket of 64 overflows once in 10^7 blocks (Poisson tail), so below the cap the index is as good as exact, and there is
nothing to grow, rehash or sweep.
"""

import numpy as np
import numpy.typing as npt

from schemas.ids import WorkerId
from services.prefix_hash import BlockHashes
from services.router.holder_sets import EMPTY, HolderSets

NUM_WAYS = 64
BYTES_PER_SLOT = 16
FIRST_STRETCH = 64
"""Blocks looked up at first; each further stretch is four times as long, so that a miss is cheap."""

MAX_TICK = 2**32 - 1

Slots = npt.NDArray[np.int64]


class PrefixIndex:
    """Block hashes to the workers that hold them: room for `max_blocks`, and never more than twice as many.

    Blocks are named as services.prefix_hash does. Uses of a block are those that store or match it.
    """

    def __init__(self, max_blocks: int, *, max_tick: int = MAX_TICK) -> None:
        num_buckets = -(-2 * max_blocks // NUM_WAYS)
        self._num_buckets = np.uint64(num_buckets)
        self._keys = np.zeros((num_buckets, NUM_WAYS), dtype=np.uint64)
        self._sets = np.zeros(num_buckets * NUM_WAYS, dtype=np.int32)
        self._ticks = np.zeros((num_buckets, NUM_WAYS), dtype=np.uint32)
        self._holders = HolderSets()
        self._tick = 0
        self._max_tick = max_tick

    @property
    def num_blocks(self) -> int:
        """Blocks known to be held by anybody."""
        return self._holders.num_held_blocks

    @property
    def num_holder_sets(self) -> int:
        """Different sets of holders in use."""
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        """The table's fixed memory; the holder sets come on top."""
        return int(self._keys.nbytes + self._sets.nbytes + self._ticks.nbytes)

    def stored(self, worker: WorkerId, hashes: BlockHashes) -> None:
        """The worker holds these blocks now; the order is of no meaning."""
        if not len(hashes):
            return
        bit = self._holders.bits.enrol(worker)
        keys = _distinct(hashes)
        slots = self._find(keys)
        self._use(slots[slots >= 0])
        missing = slots < 0
        slots[missing] = self._place(keys[missing])
        # A full bucket may have given up a block of this very call.
        is_there = self._keys.reshape(-1)[slots] == keys
        self._change(slots[is_there], bit, holds=True)

    def removed(self, worker: WorkerId, hashes: BlockHashes) -> None:
        """The worker gave these blocks up; blocks it wasn't known to hold are passed over."""
        bit = self._holders.bits.bit(worker)
        if not bit or not len(hashes):
            return
        slots = self._find(_distinct(hashes))
        self._change(slots[slots >= 0], bit, holds=False)

    def cleared(self, worker: WorkerId) -> None:
        """The worker holds nothing any more: in time proportional to the number of holder sets, not of blocks."""
        self._holders.clear(worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone for good."""
        self._holders.forget(worker)

    def match(self, hashes: BlockHashes) -> dict[WorkerId, int]:
        """Return for each worker how many leading blocks it holds without a gap; workers with none are left out.

        Counts as a use of the blocks that any of them holds.
        """
        found: dict[WorkerId, int] = {}
        active, start, length = -1, 0, FIRST_STRETCH
        while active and start < len(hashes):
            slots = self._find(_keyed(hashes[start : start + length]))
            active, depth = self._walk(slots, active, start, found)
            self._use(slots[: depth - start])
            start, length = start + len(slots), 4 * length
        if active > 0:
            found.update(dict.fromkeys(self._holders.bits.workers(active), len(hashes)))
        return found

    def _walk(self, slots: Slots, active: int, start: int, found: dict[WorkerId, int]) -> tuple[int, int]:
        """Follow the workers in `active` (-1: everybody) along these blocks; note in `found` where each one leaves.

        Returns who is left and the block where the last one left.
        """
        numbers = np.where(slots >= 0, self._sets[slots], EMPTY)
        changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for index in (0, *changes.tolist()):
            still = active & self._holders.mask(int(numbers[index]))
            if still != active:
                if active > 0 and start + index:
                    found.update(dict.fromkeys(self._holders.bits.workers(active & ~still), start + index))
                active = still
                if not active:
                    return 0, start + index
        return active, start + len(slots)

    def _find(self, keys: BlockHashes) -> Slots:
        """Return the slot of each key, -1 for unknown ones."""
        buckets = keys % self._num_buckets
        is_key = self._keys[buckets] == keys[:, None]
        ways = is_key.argmax(axis=1)
        slots = buckets.astype(np.int64) * NUM_WAYS + ways
        return np.where(is_key[np.arange(len(keys)), ways], slots, -1)

    def _place(self, keys: BlockHashes) -> Slots:
        """Give each of these distinct, unknown keys a slot: an empty one, or the least recently used of its bucket."""
        self._advance()
        buckets = (keys % self._num_buckets).astype(np.int64)
        slots = np.empty(len(keys), dtype=np.int64)
        left = np.arange(len(keys))
        while len(left):
            # One of each bucket at a time: the next of the same bucket must see this one's slot taken.
            first = _first_of_each(buckets[left])
            chosen = left[first]
            ways = self._ticks[buckets[chosen]].argmin(axis=1)
            slots[chosen] = buckets[chosen] * NUM_WAYS + ways
            self._take(slots[chosen], keys[chosen])
            left = left[~first]
        return slots

    def _take(self, slots: Slots, keys: BlockHashes) -> None:
        for number, part in self._by_set(slots):
            if number != EMPTY:
                self._holders.drop(number, len(part))
        self._sets[slots] = EMPTY
        self._keys.reshape(-1)[slots] = keys
        self._ticks.reshape(-1)[slots] = self._tick

    def _change(self, slots: Slots, bit: int, *, holds: bool) -> None:
        """Add a worker to the holders of the blocks in these slots, or take it out; blocks without any are dropped."""
        for number, part in self._by_set(slots):
            mask = self._holders.mask(number)
            target = self._move(number, mask | bit if holds else mask & ~bit, len(part))
            self._sets[part] = target
            if target == EMPTY:
                self._keys.reshape(-1)[part] = 0
                self._ticks.reshape(-1)[part] = 0

    def _by_set(self, slots: Slots) -> list[tuple[int, Slots]]:
        """Return the slots of each set of holders; mostly there is but one."""
        numbers = self._sets[slots]
        if not len(slots):
            return []
        if (numbers == numbers[0]).all():
            return [(int(numbers[0]), slots)]
        return [(number, slots[numbers == number]) for number in np.unique(numbers).tolist()]

    def _move(self, number: int, mask: int, count: int) -> int:
        """EMPTY stands for slots without a block, which nobody counts."""
        if not mask:
            if number != EMPTY:
                self._holders.drop(number, count)
            return EMPTY
        target = self._holders.add(mask, count)
        if number != EMPTY:
            self._holders.drop(number, count)
        return target

    def _use(self, slots: Slots) -> None:
        if len(slots):
            self._advance()
            self._ticks.reshape(-1)[slots] = self._tick

    def _advance(self) -> None:
        """Make now later than all uses so far; when the counter is full, halve all of them (equal ones stay equal)."""
        if self._tick == self._max_tick:
            used = self._ticks > 0
            self._ticks //= 2
            self._ticks[used & (self._ticks == 0)] = 1
            self._tick //= 2
        self._tick += 1


def _first_of_each(values: Slots) -> npt.NDArray[np.bool_]:
    """Return which elements are the first of their value."""
    first: dict[int, int] = {}
    for index, value in enumerate(values.tolist()):
        first.setdefault(value, index)
    is_first = np.zeros(len(values), dtype=np.bool_)
    is_first[list(first.values())] = True
    return is_first


def _distinct(hashes: BlockHashes) -> BlockHashes:
    """Return the hashes as table keys, each once."""
    keys = _keyed(hashes)
    return keys if len(set(keys.tolist())) == len(keys) else np.unique(keys)


def _keyed(hashes: BlockHashes) -> BlockHashes:
    """Return the hashes as table keys: 0 stands for an empty slot."""
    return np.where(hashes == 0, np.uint64(1), hashes)
