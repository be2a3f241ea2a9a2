"""SGLang's KV cache events in busway's one form. Pure.

A batch is [ts, events, rank] in MessagePack; an event is a map with its class name as `type`
(sglang/srt/disaggregation/kv_events.py@0.5.23). Hashes are SGLang's own, of the format "dynamo": another salt, another
hash. A table leads from them to our names, which are chained from the token ids that come along. Blocks that are not
whole, or known by more than ids and salt (an adapter, two ids a position), aren't told.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.kv_events import KvChange
from services.engines.adapter.cache_names import CacheNames
from services.prefix_hash import root_hash

DEVICE = "GPU"
_decoder = msgspec.msgpack.Decoder()


class KvEventBook:
    """The names of what one engine caches, on the device or in lower tiers."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._names = CacheNames(page_size)
        self._next_number = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached, in use or not."""
        return self._names.num_blocks

    def take(self, number: int, payload: bytes) -> tuple[KvChange, ...]:
        """Return what a batch changes; they are numbered from 0. After a gap everything is forgotten, for what was
        removed meanwhile isn't known."""
        if number != self._next_number:
            self._names.clear()
        self._next_number = number + 1
        for event in _decoder.decode(payload)[1]:
            self._apply(event)
        return self._names.take()

    def _apply(self, event: Mapping[str, Any]) -> None:
        place = event.get("medium") or DEVICE
        match event["type"]:
            case "BlockStored":
                self._store(place, event)
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self._names.remove((place, block_hash))
            case "AllBlocksCleared":
                self._names.clear()

    def _store(self, place: str, event: Mapping[str, Any]) -> None:
        if not _is_plain(event):
            return
        parent_hash = event.get("parent_block_hash")
        parent = root_hash(event.get("cache_salt") or "")
        if parent_hash is not None:
            known = self._names.name_of((place, parent_hash)) or self._names.name_of((DEVICE, parent_hash))
            if known is None:
                return  # follows a block that was never told
            parent = known
        for index, block_hash in enumerate(event["block_hashes"]):
            ids = event["token_ids"][index * self._page_size : (index + 1) * self._page_size]
            if len(ids) == self._page_size:
                parent = self._names.store((place, block_hash), parent, ids)


def _is_plain(event: Mapping[str, Any]) -> bool:
    """Return whether its ids and salt are all that names its blocks."""
    ids = event["token_ids"]
    has_adapter = event.get("lora_id") is not None or event.get("lora_name") is not None
    return not has_adapter and all(isinstance(token_id, int) for token_id in ids)
