"""What a loaded LLM says of itself: EngineProfile and limits from `llm.args` and its own KV capacity [L, A].

`get_kv_cache_capacity` came late and may answer {} [X]; older releases tell the same in an iteration's statistics,
once something has run (`enable_iter_perf_stats`).
"""

import asyncio
from functools import partial
from typing import Any

import msgspec

from schemas.errors import EngineError
from schemas.model_card import ModelCard
from services.engines.adapter.profile import layout_digest
from services.engines.protocol import EngineProfile
from services.engines.trtllm import own_metrics
from services.engines.trtllm.api import Llm, TrtllmApi

STATISTICS_TIMEOUT_S = 1.0
# Upstream's default from PR #13868 on; before, there was none.
DEFAULT_KV_TIMEOUT_S = 60.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The primary KV pool."""

    num_blocks: int
    block_size: int


async def kv_capacity(llm: Llm) -> Capacity:
    """Return the engine's KV capacity; something must have run. Raises EngineError when it says none."""
    found = _asked_capacity(llm)
    if found is None:
        async for statistics in llm.get_stats_async(timeout=STATISTICS_TIMEOUT_S):
            cache = statistics.get("kvCacheStats") or {}
            found = _capacity(cache.get("maxNumBlocks"), cache.get("tokensPerBlock"))
            if found is not None:
                break
    if found is None:
        raise EngineError(
            "this release of TensorRT-LLM doesn't say its KV capacity: give the engine argument "
            "enable_iter_perf_stats=true"
        )
    return found


def _asked_capacity(llm: Llm) -> Capacity | None:
    if "get_kv_cache_capacity" not in dir(llm):
        return None
    answer: dict[str, Any] = llm.get_kv_cache_capacity()  # type: ignore[attr-defined]
    return _capacity(answer.get("maxNumBlocks"), answer.get("tokensPerBlock"))


def _capacity(num_blocks: Any, block_size: Any) -> Capacity | None:
    return Capacity(num_blocks=int(num_blocks), block_size=int(block_size)) if num_blocks and block_size else None


def kv_timeout_s(args: Any) -> float | None:
    """Return after how many seconds the engine frees context KV that nobody fetched; None: never, or no handoffs."""
    config = args.cache_transceiver_config
    timeout_ms = None if config is None else config.kv_transfer_timeout_ms
    return None if timeout_ms is None else timeout_ms / 1000


def profile(api: TrtllmApi, args: Any, card: ModelCard, capacity: Capacity) -> EngineProfile:
    """Return the engine's profile. With attention DP each rank serves requests of its own."""
    dtype = str(args.kv_cache_config.dtype)
    kv_dtype = str(args.dtype) if dtype == "auto" else dtype
    max_context_tokens = args.max_seq_len or card.max_context_tokens
    if not max_context_tokens:
        raise EngineError("neither the model nor max_seq_len says how long a context may be")
    return EngineProfile(
        backend="trtllm",
        card=msgspec.structs.replace(card, max_context_tokens=max_context_tokens),
        handoff="after_prefill",
        block_size=capacity.block_size,
        total_kv_blocks=capacity.num_blocks,
        max_num_seqs=args.max_batch_size,
        max_batched_tokens=args.max_num_tokens,
        max_context_tokens=max_context_tokens,
        kv_layout=_kv_layout(api, args, kv_dtype, capacity),
        kv_dtype=kv_dtype,
        engine_version=api.version,
        tp_size=args.tensor_parallel_size,
        pp_size=args.pipeline_parallel_size,
        own_metrics=None if api.metrics_collector is None else partial(asyncio.to_thread, own_metrics.text),
        has_kv_events=bool(args.kv_cache_config.event_buffer_max_size),
        dp_size=args.tensor_parallel_size if args.enable_attention_dp else 1,
    )


def _kv_layout(api: TrtllmApi, args: Any, kv_dtype: str, capacity: Capacity) -> str:
    """Return the digest of what context and generation must share: the same build (nobody else checks it [W]), KV
    dtype, tokens per block, transceiver. TP and PP may differ; heads and layers are in the model's digest."""
    config = args.cache_transceiver_config
    transceiver = "" if config is None else str(config.backend).upper().replace("DEFAULT", "NIXL")
    runtime = "" if config is None else str(vars(config).get("transceiver_runtime", ""))
    return layout_digest(api.version, kv_dtype, capacity.block_size, transceiver, runtime)[:16]
