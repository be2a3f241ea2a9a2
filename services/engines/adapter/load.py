"""An engine's load: what its legs, its blocks and its counters each say of it. Pure."""

from collections.abc import Collection
from typing import Protocol

import msgspec

from schemas.worker import PrefillCost
from services.engines.protocol import EngineLoad


class Totals(msgspec.Struct, kw_only=True):
    """Counters since start, as in EngineLoad."""

    num_remote_prefills: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_transfer_bytes: int = 0


class CountedLeg(Protocol):
    """What a leg's load is."""

    def is_running(self) -> bool:
        """Whether it has tokens already."""
        ...

    def num_queued_tokens(self) -> int:
        """How many prompt tokens are still to be computed here."""
        ...


class LegsLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The open legs; `queued_tokens` are prompt tokens still to be computed here."""

    running: int
    waiting: int
    queued_tokens: int

    @classmethod
    def of(cls, legs: Collection[CountedLeg]) -> "LegsLoad":
        """Return the load of legs that know whether they run."""
        running = sum(leg.is_running() for leg in legs)
        queued_tokens = sum(leg.num_queued_tokens() for leg in legs)
        return cls(running=running, waiting=len(legs) - running, queued_tokens=queued_tokens)


class BlocksLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's pool; `held` counts the requests whose blocks only a peer or the engine isn't done with."""

    used: int
    cached: int
    total: int
    held: int


def engine_load(
    legs: LegsLoad,
    blocks: BlocksLoad,
    totals: Totals,
    *,
    transport: str,
    progress: int,
    prefill_cost: PrefillCost | None = None,
) -> EngineLoad:
    """Return it all as one report; KV bytes moved are by `transport`."""
    return EngineLoad(
        running=legs.running,
        waiting=legs.waiting,
        num_held=blocks.held,
        kv_blocks_used=blocks.used,
        kv_blocks_cached=blocks.cached,
        kv_blocks_total=blocks.total,
        kv_blocks_quarantined=0,
        queued_prefill_tokens=legs.queued_tokens,
        progress=progress,
        kv_transfer_bytes={transport: totals.num_transfer_bytes} if totals.num_transfer_bytes else {},
        num_remote_prefills=totals.num_remote_prefills,
        num_recomputed_tokens=totals.num_recomputed_tokens,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_cached_tokens=totals.num_cached_tokens,
        num_generated_tokens=totals.num_generated_tokens,
        prefill_cost=prefill_cost,
    )
