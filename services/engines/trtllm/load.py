"""The load: counted from our own legs at once, KV usage corrected by the engine's iteration statistics. Pure.

Statistics come late and stop when the engine idles, so what was last heard is forgotten soon, and when nothing is left
here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from services.engines.protocol import EngineLoad
from services.engines.trtllm.held import HeldKv

STALE_AFTER_S = 1.0


class Totals(msgspec.Struct, kw_only=True):
    """Counts since start; `num_results` and `num_iterations` make the progress."""

    num_results: int = 0
    num_iterations: int = 0
    num_remote_prefills: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_transfer_bytes: int = 0


class LiveLeg(Protocol):
    """What a leg's load is. `is_muted`: its attempt is over, only the engine isn't done with it yet."""

    @property
    def is_muted(self) -> bool: ...

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it holds or will."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that this engine has yet to compute."""
        ...


class LoadBook:
    """One engine's load. `num_cached_blocks` are those that its KV events have told of, in use or not."""

    def __init__(self, *, block_size: int, total_blocks: int, max_num_seqs: int, held: HeldKv) -> None:
        self.totals = Totals()
        self.num_cached_blocks = 0
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._max_num_seqs = max_num_seqs
        self._held = held
        self._used_blocks: dict[int, int] = {}
        self._heard_at = 0.0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold the KV of this many tokens."""
        return -(-num_tokens // self._block_size)

    def observe(self, statistics: Mapping[str, Any], now: float) -> None:
        """Take one iteration's statistics [Y: publisher.py]; each attention-DP rank has its own."""
        self.totals.num_iterations += 1
        self._heard_at = now
        cache = statistics.get("kvCacheStats")
        if cache:
            self._used_blocks[int(statistics.get("attentionDpRank") or 0)] = int(cache["usedNumBlocks"])

    def load(self, legs: Iterable[LiveLeg], now: float) -> EngineLoad:
        """Return the load of these legs and of what is held."""
        all_legs = list(legs)
        live = [leg for leg in all_legs if not leg.is_muted]
        num_held, held_blocks = self._held.totals(now)
        own_blocks = held_blocks + sum(self.num_blocks_for(leg.num_tokens) for leg in all_legs)
        if not own_blocks or now - self._heard_at > STALE_AFTER_S:
            self._used_blocks.clear()
        used = min(self._total_blocks, sum(self._used_blocks.values()) or own_blocks)
        running = min(len(live), self._max_num_seqs)
        totals = self.totals
        return EngineLoad(
            running=running,
            waiting=len(live) - running,
            num_held=num_held + len(all_legs) - len(live),
            kv_blocks_used=used,
            kv_blocks_cached=min(self.num_cached_blocks, self._total_blocks - used),
            kv_blocks_total=self._total_blocks,
            kv_blocks_quarantined=0,
            queued_prefill_tokens=sum(leg.num_queued_tokens for leg in live),
            progress=totals.num_results + totals.num_iterations,
            kv_transfer_bytes={"transceiver": totals.num_transfer_bytes} if totals.num_transfer_bytes else {},
            num_remote_prefills=totals.num_remote_prefills,
            num_recomputed_tokens=totals.num_recomputed_tokens,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_tokens=totals.num_cached_tokens,
            num_generated_tokens=totals.num_generated_tokens,
        )
