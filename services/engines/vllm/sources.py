"""Which blocks of the core hold KV that a request fetched from a peer. Reads vLLM's scheduler; engine's thread only.

Blocks before those came from the own prefix cache: they are as good as ever, and usually others use them too.
"""

from typing import Any

import msgspec


class Source(msgspec.Struct, kw_only=True):
    """A request (vLLM's object) whose KV comes from a peer and isn't proven good. `num_local_tokens` of its prompt were
    in the own cache; None until its first output."""

    vllm_request: Any
    num_local_tokens: int | None = None

    def note(self, output: Any) -> None:
        """Take the counts that come with the request's first output."""
        if output.prefill_stats is not None:
            self.num_local_tokens = output.prefill_stats.num_local_cached_tokens

    def num_own_tokens(self) -> int:
        """Return how many of the prompt's tokens were not fetched; before its first output the request itself knows."""
        if self.num_local_tokens is not None:
            return self.num_local_tokens
        stats = self.vllm_request.prefill_stats
        return stats.num_local_cached_tokens if stats is not None else 0


def poisoned_blocks(scheduler: Any, source: Source, core_id: str) -> set[int]:
    """Return the blocks with fetched KV, in the request's table or, also when it has ended, in the prefix cache."""
    manager = scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    num_own = source.num_own_tokens()
    found: set[int] = set()
    for index, group in enumerate(groups):
        first = num_own // group.kv_cache_spec.block_size
        if core_id in scheduler.requests:
            found.update(manager.get_block_ids(core_id)[index][first:])
        for block_hash in source.vllm_request.block_hashes[num_own // manager.block_pool.hash_block_size :]:
            blocks = manager.block_pool.get_cached_block(block_hash, [index])
            found.update(block.block_id for block in blocks or ())
    return found


def shares(scheduler: Any, core_id: str, blocks: set[int]) -> bool:
    """Return whether a live request uses any of these blocks."""
    if core_id not in scheduler.requests:
        return False
    return any(not blocks.isdisjoint(group) for group in scheduler.kv_cache_manager.get_block_ids(core_id))
