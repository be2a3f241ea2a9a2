"""The load: counted from our own legs at once, KV usage corrected by the engine's iteration statistics. Pure.

Statistics come late and stop when the engine idles, so what was last heard is forgotten soon, and when nothing is left
here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from services.engines.adapter.load import BlocksLoad, LegsLoad, Totals, engine_load
from services.engines.protocol import EngineLoad
from services.engines.trtllm.held import HeldKv

STALE_AFTER_S = 1.0


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
    """One engine's load. `num_cached_blocks` are those that its KV events have told of, in use or not. Results and
    iterations make the progress."""

    def __init__(self, *, block_size: int, total_blocks: int, max_num_seqs: int, held: HeldKv) -> None:
        self.num_cached_blocks = 0
        self.num_results = 0
        self._num_iterations = 0
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
        self._num_iterations += 1
        self._heard_at = now
        cache = statistics.get("kvCacheStats")
        if cache:
            self._used_blocks[int(statistics.get("attentionDpRank") or 0)] = int(cache["usedNumBlocks"])

    def load(self, legs: Iterable[LiveLeg], totals: Totals, now: float) -> EngineLoad:
        """Return the load of these legs and of what is held. The engine doesn't say which legs run: as many as can."""
        all_legs = list(legs)
        live = [leg for leg in all_legs if not leg.is_muted]
        num_held, held_blocks = self._held.totals(now)
        own_blocks = held_blocks + sum(self.num_blocks_for(leg.num_tokens) for leg in all_legs)
        if not own_blocks or now - self._heard_at > STALE_AFTER_S:
            self._used_blocks.clear()
        used = min(self._total_blocks, sum(self._used_blocks.values()) or own_blocks)
        running = min(len(live), self._max_num_seqs)
        queued_tokens = sum(leg.num_queued_tokens for leg in live)
        blocks = BlocksLoad(
            used=used,
            cached=min(self.num_cached_blocks, self._total_blocks - used),
            total=self._total_blocks,
            held=num_held + len(all_legs) - len(live),
        )
        return engine_load(
            LegsLoad(running=running, waiting=len(live) - running, queued_tokens=queued_tokens),
            blocks,
            totals,
            transport="transceiver",
            progress=self.num_results + self._num_iterations,
        )
