"""Who owns which KV block. Pure accounting: it never touches the pool's memory.

Each block is in one of four places: used (referenced), quarantined (referenced only by transfers given up), cached
(unreferenced, its KV still known by hash) or free. Only the last two are ever handed out.
"""

from collections.abc import Sequence as Seq

from schemas.ids import AttemptId
from services.engines.paged.cache_log import CacheLog
from services.engines.paged.hashing import BlockHash
from services.engines.paged.prefix_cache import PrefixCache


class PoolExhaustedError(Exception):
    """More blocks were asked for than are free or cached: a bug of the caller, who asks first."""


class BlockManager:
    """Reference counts, prefix cache and quarantine over the blocks 0 … num_blocks-1. `log` tells what the cache gained
    and lost."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self._names: dict[int, int] = {}
        self.log = CacheLog()
        self._set_aside: dict[AttemptId, list[int]] = {}
        self._num_set_aside_refs: dict[int, int] = {}
        self.num_quarantined = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free and cached ones."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose KV is still known."""
        return self._cache.num_idle

    @property
    def num_used(self) -> int:
        """Blocks referenced by somebody other than the quarantine."""
        return self.num_blocks - self.num_available - self.num_quarantined

    def match(self, hashes: list[BlockHash], max_blocks: int) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `max_blocks`, without referencing them."""
        return self._cache.match(hashes, max_blocks)

    def can_take(self, hits: Seq[int], num_new: int) -> bool:
        """Return whether `hits` and `num_new` further blocks can be had together."""
        num_idle_hits = sum(map(self._cache.is_idle, hits))
        return num_new <= self.num_available - num_idle_hits

    def take(self, hits: Seq[int], num_new: int) -> list[int]:
        """Reference `hits` and `num_new` private blocks and return them in this order.

        Raises PoolExhaustedError, and takes nothing, unless `can_take`.
        """
        if not self.can_take(hits, num_new):
            raise PoolExhaustedError(f"{num_new} blocks asked for, {self.num_available} available")
        for block_id in hits:
            self._reference(block_id)
        return [*hits, *(self._take_one() for _ in range(num_new))]

    def publish(self, block_id: int, block_hash: BlockHash, name: int = 0, parent: int = 0) -> None:
        """Make a referenced block's complete KV a prefix hit for others. It must not be written any more.

        `name` is what others than engines call the block (services/prefix_hash.py), `parent` the one before it.
        """
        if self._cache.publish(block_id, block_hash):
            self._names[block_id] = name
            self.log.stored(parent, name)

    def forget(self, block_ids: Seq[int]) -> None:
        """Let referenced blocks be nobody's prefix hit any more."""
        for block_id in block_ids:
            if self._cache.forget(block_id):
                self.log.removed(self._names.pop(block_id))

    def release(self, block_ids: Seq[int]) -> None:
        """Give up one reference to each; a sequence's tail becomes evictable before its head."""
        for block_id in reversed(block_ids):
            self._dereference(block_id)

    def quarantine(self, attempt_id: AttemptId, block_ids: Seq[int]) -> None:
        """Hand the caller's references over to a transfer that may still touch the blocks, until `settle`."""
        if not block_ids:
            return
        self._set_aside.setdefault(attempt_id, []).extend(block_ids)
        for block_id in block_ids:
            num_refs = self._num_set_aside_refs[block_id] = self._num_set_aside_refs.get(block_id, 0) + 1
            self.num_quarantined += num_refs == self._num_refs[block_id]

    def settle(self, attempt_id: AttemptId) -> None:
        """The attempt's transfer is over: give up its references; idempotent."""
        for block_id in reversed(self._set_aside.pop(attempt_id, [])):
            num_set_aside = self._num_set_aside_refs.pop(block_id) - 1
            if num_set_aside:
                self._num_set_aside_refs[block_id] = num_set_aside
            num_refs = self._num_refs[block_id] = self._num_refs[block_id] - 1
            if not num_refs:
                self.num_quarantined -= 1
                self._vacate(block_id)

    def _take_one(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = self._cache.evict()
            self.log.removed(self._names.pop(block_id))
        self._num_refs[block_id] = 1
        return block_id

    def _reference(self, block_id: int) -> None:
        num_refs = self._num_refs[block_id]
        if not num_refs:
            self._cache.wake(block_id)
        elif self._num_set_aside_refs.get(block_id) == num_refs:
            self.num_quarantined -= 1
        self._num_refs[block_id] = num_refs + 1

    def _dereference(self, block_id: int) -> None:
        num_refs = self._num_refs[block_id] = self._num_refs[block_id] - 1
        if not num_refs:
            self._vacate(block_id)
        elif self._num_set_aside_refs.get(block_id) == num_refs:
            self.num_quarantined += 1

    def _vacate(self, block_id: int) -> None:
        if block_id in self._cache:
            self._cache.rest(block_id)
        else:
            self._free.append(block_id)
