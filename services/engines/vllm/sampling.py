"""From our request to vLLM's SamplingParams, as plain values. Pure.

vLLM's own EOS handling is off (ignore_eos): which ids end a completion is the model card's to say, as for every other
engine, so that min_tokens bans exactly those.
"""

from typing import Literal

from schemas.request import GenerateRequest
from services.engines.adapter.refusals import refuse_inexact_resume, refuse_priority
from services.engines.paged.limits import Limits

Leg = Literal["prefill", "decode"]

SEED_MASK = 2**63 - 1


def num_left(request: GenerateRequest) -> int:
    """Return how many tokens are still to be generated."""
    return request.stop.max_tokens - len(request.resume)


def sampling_values(request: GenerateRequest, limits: Limits, leg: Leg) -> dict[str, object]:
    """Return the keyword arguments of SamplingParams (vllm/sampling_params.py@0.32.0).

    Prefill draws one token only to learn whether it ends the request: it gets the stop ids and at most one of
    min_tokens, nothing of the completion's length.
    """
    sampling, stop = request.sampling, request.stop
    most = 1 if leg == "prefill" else num_left(request)
    values: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": most,
        "min_tokens": min(max(0, stop.min_tokens - len(request.resume)), most),
        "stop_token_ids": sorted(limits.stop_ids(request)),
        "ignore_eos": True,
        "detokenize": False,
    }
    if sampling.temperature > 0:  # vLLM takes -1 for no seed, and its greedy batches are faster without
        values["seed"] = sampling.seed & SEED_MASK
    if request.num_logprobs is not None:
        values["logprobs"] = request.num_logprobs
    return values


def check_request(request: GenerateRequest, *, has_priorities: bool) -> None:
    """Raise RequestError, naming the field, for what vLLM can't do."""
    refuse_inexact_resume(request, "vLLM")
    refuse_priority(request, "vLLM", has_priorities=has_priorities, how="start it with -- --scheduling-policy priority")
