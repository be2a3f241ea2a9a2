"""The engine's KV cache events in busway's one form. Pure.

An event is {event_id, data, window_size, attention_dp_rank?} with data stored{parent_hash, blocks}, removed
{block_hashes}, updated or created [tensorrt_llm/_utils.py #52995752; tokens as in tests/unittest of its gRPC server].
Its block hashes are its own, so a table leads from them to our names, which are chained from the tokens. What it says
of blocks that aren't whole (they can't be shared by name), of LoRA and of multimodal keys isn't told; nor are windows
smaller than the largest [Y]. Older releases don't say a block's cache salt: there salted blocks get unsalted names,
which costs a bad choice of the router's and nothing else.
"""

from collections.abc import Mapping
from typing import Any

from schemas.kv_events import KvChange
from services.engines.adapter.cache_names import CacheNames
from services.prefix_hash import root_hash

Rank = int


class KvEventBook:
    """The names of what is cached. Attention-DP ranks have caches of their own: a name is gone when all dropped it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names = CacheNames(block_size)
        self._last_ids: dict[Rank, int] = {}
        self._window_size = 0

    @property
    def num_blocks(self) -> int:
        """Whole blocks that are cached, in use or not."""
        return self._names.num_blocks

    def take(self, event: Mapping[str, Any]) -> tuple[KvChange, ...]:
        """Return what an event changes. After a gap in a rank's event ids all names are forgotten, for what was
        removed meanwhile isn't known."""
        rank, event_id = int(event.get("attention_dp_rank") or 0), int(event["event_id"])
        last_id = self._last_ids.get(rank)
        self._last_ids[rank] = event_id
        if last_id is not None and event_id != last_id + 1:
            self._names.clear()
        window_size = int(event.get("window_size") or 0)
        self._window_size = max(self._window_size, window_size)
        if window_size == self._window_size:
            self._apply(rank, event["data"])
        return self._names.take()

    def _apply(self, rank: Rank, data: Mapping[str, Any]) -> None:
        if data["type"] == "stored":
            self._store(rank, data["parent_hash"], data["blocks"])
        elif data["type"] == "removed":
            for block_hash in data["block_hashes"]:
                self._names.remove((rank, block_hash))

    def _store(self, rank: Rank, parent_hash: int | None, blocks: list[Mapping[str, Any]]) -> None:
        parent = None if parent_hash is None else self._names.name_of((rank, parent_hash))
        if parent_hash is not None and parent is None:
            return  # follows a block that was never told
        for block in blocks:
            token_ids = _nameable_ids(block, self._block_size)
            if token_ids is None:
                return
            if parent is None:
                parent = root_hash(block.get("cache_salt") or "")
            parent = self._names.store((rank, block["block_hash"]), parent, token_ids)


def _nameable_ids(block: Mapping[str, Any], block_size: int) -> list[int] | None:
    """Return a block's token ids; None for one that isn't whole or isn't known by its tokens alone."""
    tokens = block["tokens"]
    is_plain = not any(token.get("token_extra_id") for token in tokens)
    if len(tokens) != block_size or not is_plain or block.get("mm_keys") or block.get("lora_name"):
        return None
    return [token["token_id"] for token in tokens]
