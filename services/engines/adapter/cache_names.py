"""From an engine's own names of its cached blocks to ours (services/prefix_hash.py). Pure.

Engines chain hashes of their own over more than token ids. What they tell of a block is its hash, its parent's and its
tokens; from these our names follow, so that one router index serves all engines.
"""

from collections.abc import Hashable, Sequence

from schemas.kv_events import KvChange, KvCleared
from services.engines.paged.cache_log import CacheLog
from services.prefix_hash import chain


class CacheNames:
    """Blocks by the engine's `key`. Several keys may lead to one name (copies, ranks): it is told when the first comes
    and taken back when the last has gone."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[Hashable, int] = {}
        self._num_holders: dict[int, int] = {}
        self._log = CacheLog()
        self._told: list[KvChange] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        return len(self._names)

    def name_of(self, key: Hashable) -> int | None:
        """Return our name of a cached block; None for one that was never told."""
        return self._names.get(key)

    def store(self, key: Hashable, parent: int, token_ids: Sequence[int]) -> int:
        """A whole block is cached, behind the block named `parent`; return its name. Told again, nothing changes."""
        known = self._names.get(key)
        if known is not None:
            return known
        (name,) = chain(parent, token_ids, self._block_size)
        self._names[key] = name
        self._num_holders[name] = self._num_holders.get(name, 0) + 1
        if self._num_holders[name] == 1:
            self._log.stored(parent, name)
        return name

    def remove(self, key: Hashable) -> None:
        """A block is gone; one that was never told is passed over."""
        name = self._names.pop(key, None)
        if name is None:
            return
        self._num_holders[name] -= 1
        if not self._num_holders[name]:
            del self._num_holders[name]
            self._log.removed(name)

    def clear(self) -> None:
        """Every block is gone, or nobody knows which."""
        self._names.clear()
        self._num_holders.clear()
        self._told += [*self._log.take(), KvCleared()]

    def take(self) -> tuple[KvChange, ...]:
        """Return the changes since the last call, in order."""
        told, self._told = self._told, []
        return (*told, *self._log.take())
