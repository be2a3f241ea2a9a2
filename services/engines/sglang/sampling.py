"""From our request to SGLang's SamplingParams, as plain values. Pure.

Both legs get the same values: SGLang's prefill draws the first token by them and ends there whatever they say of
length. Its own EOS is switched off (plugin.py): which ids end a completion is the model card's to say, as for every
other engine, so that min_tokens bans exactly those.
"""

from schemas.errors import RequestError
from schemas.request import GenerateRequest
from services.engines.adapter.refusals import refuse_inexact_resume, refuse_priority
from services.engines.paged.limits import Limits
from services.engines.sglang.words import EngineSpec

MAX_REPETITION_PENALTY = 2.0


def sampling_values(request: GenerateRequest, limits: Limits) -> dict[str, object]:
    """Return the keyword arguments of SamplingParams (sglang/srt/sampling/sampling_params.py@0.5.23).

    Stop ids outside the vocabulary are never drawn; SGLang's scheduler dies of them where it is to ban them.
    """
    sampling, stop, num_resumed = request.sampling, request.stop, len(request.resume)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "sampling_seed": sampling.seed,
        "max_new_tokens": stop.max_tokens - num_resumed,
        "min_new_tokens": max(0, stop.min_tokens - num_resumed),
        "stop_token_ids": sorted(one for one in limits.stop_ids(request) if one < limits.vocab_size),
        "ignore_eos": False,
    }


def check_request(request: GenerateRequest, spec: EngineSpec) -> None:
    """Raise RequestError, naming the field, for what this SGLang engine can't do."""
    sampling = request.sampling
    refuse_inexact_resume(request, "SGLang")
    refuse_priority(
        request, "SGLang", has_priorities=spec.has_priorities, how="start it with -- --enable-priority-scheduling"
    )
    if sampling.is_user_seeded and sampling.temperature > 0 and not spec.has_seeds:
        raise RequestError(
            "this SGLang worker's sampling backend knows no seeds: start it with -- --sampling-backend pytorch",
            param="seed",
        )
    if sampling.repetition_penalty > MAX_REPETITION_PENALTY:
        limit, wanted = MAX_REPETITION_PENALTY, sampling.repetition_penalty
        raise RequestError(
            f"repetition_penalty is at most {limit:g} with SGLang, not {wanted:g}", param="repetition_penalty"
        )
    if request.stop.min_tokens > request.stop.max_tokens:
        raise RequestError(
            f"min_tokens={request.stop.min_tokens} exceeds max_tokens={request.stop.max_tokens}", param="min_tokens"
        )
