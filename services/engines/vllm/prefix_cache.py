"""What the engine core's prefix cache gained and lost, and how much of it is free to take. Engine's thread only.

The core hands its KV events to a publisher once a step. Ours stands in that place, keeps them for us and passes them on
to the one that the user may have configured (--kv-events-config).
"""

from collections.abc import Iterable
from typing import Any

from schemas.kv_events import KvChange
from services.engines.vllm.cache_events import BlockHash, CacheEventBook

RECOUNT_S = 0.25


class _Tap:
    """An EventPublisher (vllm/distributed/kv_events.py@0.32.0) that keeps the events it publishes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._kept: list[Any] = []

    def publish(self, batch: Any) -> None:
        self._kept += batch.events
        self._inner.publish(batch)

    def get_publisher_config(self) -> Any:
        return self._inner.get_publisher_config()

    def shutdown(self) -> None:
        self._inner.shutdown()

    def take(self) -> Iterable[Any]:
        kept, self._kept = self._kept, []
        return kept


class PrefixCacheView:
    """One core's prefix cache. Without KV events (no prefix caching, or switched off) `changes` stays empty."""

    def __init__(self, core: Any, block_size: int) -> None:
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._tap = core.scheduler.kv_event_publisher = _Tap(core.scheduler.kv_event_publisher)
        self._book = CacheEventBook(block_size, self._is_cached)
        self._num_idle = 0
        self._counted_at = float("-inf")

    def has_news(self) -> bool:
        """Whether blocks came or went outside a step."""
        return bool(self._pool.kv_event_queue)

    def changes(self) -> tuple[KvChange, ...]:
        """Return what changed since the last call."""
        return self._book.take([*self._tap.take(), *self._pool.take_events()])

    def _is_cached(self, block_hash: BlockHash) -> bool:
        """Return whether a block of this hash is there. One who wants hashes as numbers in vLLM's own events
        (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1) can't be told, and the first copy that goes counts as all."""
        if isinstance(block_hash, int):
            return False
        from vllm.v1.core.kv_cache_utils import BlockHash as VllmBlockHash
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        key = make_block_hash_with_group_id(VllmBlockHash(block_hash), 0)
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def num_idle(self, now: float) -> int:
        """Return how many blocks hold cached KV that nobody uses: free to take, and a hit until then.

        There is no counter to read, so all blocks are looked at: at most every 0.25 s, and when the core comes to rest.
        """
        if now - self._counted_at > RECOUNT_S or not self._scheduler.has_requests():
            self._counted_at = now
            self._num_idle = sum(block.ref_cnt == 0 and block.block_hash is not None for block in self._pool.blocks)
        return self._num_idle
