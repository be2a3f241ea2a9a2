"""Between our words and vLLM's, on the engine's thread."""

import time
from typing import Any

import msgspec

from schemas.frames import TokenLogprobs
from services.engines.vllm.words import CoreOutput, CoreRequest, PromptStats


def to_core(request: CoreRequest) -> Any:
    """Return vLLM's EngineCoreRequest; raises ValueError (vLLM's) for sampling values that it refuses."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    sampling = SamplingParams(**request.sampling)
    if request.kv_transfer_params is not None:
        sampling.extra_args = {"kv_transfer_params": request.kv_transfer_params}
    return EngineCoreRequest(
        request_id=request.id,
        prompt_token_ids=request.token_ids,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=request.cache_salt or None,
        data_parallel_rank=None,
        priority=request.priority,
    )


def from_core(output: Any, num_logprobs: int | None, events: dict[str, float]) -> CoreOutput:
    """Return our form of an EngineCoreOutput. `events`: times of this request's queueing and scheduling so far."""
    return CoreOutput(
        id=output.request_id,
        token_ids=tuple(output.new_token_ids),
        logprobs=_logprobs(output.new_logprobs, num_logprobs),
        finish=None if output.finish_reason is None else str(output.finish_reason),  # type: ignore[arg-type]
        kv_transfer_params=_plain(output.kv_transfer_params),
        prompt=_prompt_stats(output.prefill_stats, events),
    )


def note_events(output: Any, events: dict[str, float]) -> None:
    """Remember when a request was queued and first scheduled (its own monotonic clock, which is ours)."""
    for event in output.events or ():
        events.setdefault(event.type.name, event.timestamp)


def _plain(params: dict[str, Any] | None) -> dict[str, object] | None:
    """Return the params as JSON has them (tuples become lists); raises TypeError for what JSON can't hold."""
    return None if params is None else msgspec.json.decode(msgspec.json.encode(params))


def _prompt_stats(stats: Any, events: dict[str, float]) -> PromptStats | None:
    if stats is None:
        return None
    now = time.monotonic()
    scheduled = events.get("SCHEDULED", now)
    return PromptStats(
        computed=stats.num_computed_tokens,
        local_cache=stats.num_local_cached_tokens,
        external=stats.num_external_cached_tokens,
        queue_s=max(0.0, scheduled - events.get("QUEUED", scheduled)),
        prefill_s=max(0.0, now - scheduled),
    )


def _logprobs(rows: Any, num_logprobs: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Return a position's chosen token first, then its `num_logprobs` best: the first column is the chosen one's."""
    if rows is None or num_logprobs is None:
        return None
    return tuple(
        TokenLogprobs(float(values[0]), tuple((int(i), float(v)) for i, v in zip(ids[1:], values[1:], strict=True)))
        for ids, values in zip(rows.logprob_token_ids, rows.logprobs, strict=True)
    )
