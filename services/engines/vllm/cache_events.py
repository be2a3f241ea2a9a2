"""vLLM's KV cache events in busway's one form. Pure: events are read by the fields of vllm/distributed/kv_events.py.

A BlockStored says hashes, their parent, all tokens and what else went into each hash (`extra_keys`): of a prompt with a
cache salt its first block has the salt there. What else can be in it (LoRA, images) never comes through busway, and
isn't told. Only blocks in the engine's own memory count, and of a model with several kinds of attention only its first
group's.

vLLM keeps copies of equal blocks and tells when one of them goes; and it tells of blocks again whenever a prompt finds
them (emit_cached_block_events in vllm/v1/core/block_pool.py@0.32.0). So events can't be counted: whether a block is
still there is asked of the engine.
"""

from collections.abc import Callable, Iterable
from typing import Any

from schemas.kv_events import KvChange
from services.engines.adapter.cache_names import CacheNames
from services.prefix_hash import root_hash

OWN_MEMORY = (None, "GPU")  # also of a CPU build (MEDIUM_GPU in vllm/distributed/kv_events.py@0.32.0)


BlockHash = bytes | int


class CacheEventBook:
    """The names of what one engine has cached, in blocks of `block_size` tokens. `is_cached` says of a hash whether the
    engine still has such a block when `take` is called."""

    def __init__(self, block_size: int, is_cached: Callable[[BlockHash], bool]) -> None:
        self._block_size = block_size
        self._is_cached = is_cached
        self._names = CacheNames(block_size)

    def take(self, events: Iterable[Any]) -> tuple[KvChange, ...]:
        """Return what these events, in order, change."""
        for event in events:
            match type(event).__name__:
                case "BlockStored" if self._is_counted(event) and event.block_size == self._block_size:
                    self._store(event)
                case "BlockRemoved" if self._is_counted(event):
                    for block_hash in event.block_hashes:
                        if not self._is_cached(block_hash):
                            self._names.remove(block_hash)
                case "AllBlocksCleared":
                    self._names.clear()
        return self._names.take()

    def _is_counted(self, event: Any) -> bool:
        return event.medium in OWN_MEMORY and not event.group_idx

    def _store(self, event: Any) -> None:
        parent = None if event.parent_block_hash is None else self._names.name_of(event.parent_block_hash)
        if event.parent_block_hash is not None and parent is None:
            return  # follows a block that was never told
        size, extra_keys = self._block_size, event.extra_keys or [None] * len(event.block_hashes)
        for index, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            salt = _salt(extra, is_first=parent is None)
            if salt is None or event.lora_name is not None:
                return
            before = root_hash(salt) if parent is None else parent
            parent = self._names.store(block_hash, before, event.token_ids[index * size : (index + 1) * size])


def _salt(extra: tuple[Any, ...] | None, *, is_first: bool) -> str | None:
    """Return the cache salt among a block's extra keys ("": none); None when there is more in them."""
    if not extra:
        return ""
    (only, *more) = extra
    return only if is_first and not more and isinstance(only, str) else None
