"""From a GenerateRequest to SamplingParams: every parameter is mapped or refused by name. Pure [S, S0, XS, W].

What is different here than in busway's own engines, and so refused where it would change the answer:
 - noise isn't a function of (seed, position), and penalties forget resumed ids: no exact continuation of those;
 - only `end_id` is banned before min_tokens, other stop ids are not;
 - the sampler ignored penalties, min_p and seeds for a long time, though SamplingParams took them.
"""

from typing import Any

import msgspec

from schemas.errors import RequestError
from schemas.request import GenerateRequest, Sampling
from services.engines.adapter.refusals import refuse_inexact_resume
from services.engines.trtllm.api import MIN_P_AND_SEEDS_SINCE, PENALTIES_SINCE, TrtllmApi

_SEED_MASK = 2**64 - 1
_NO_END_ID = -1
PERF_METRICS = "return_perf_metrics"
"""Makes a request's last output say how many bytes of KV came for it [serve/openai_server.py #54820179511]."""


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the installed release can sample. `fields` are SamplingParams' names."""

    version: str
    fields: frozenset[str]
    has_penalties: bool
    has_min_p_and_seeds: bool

    @classmethod
    def of(cls, api: TrtllmApi) -> "Abilities":
        """Return the installed release's."""
        return cls(
            version=api.version,
            fields=api.sampling_fields(),
            has_penalties=api.has_penalties(),
            has_min_p_and_seeds=api.has_min_p_and_seeds(),
        )


def sampling_kwargs(request: GenerateRequest, eos_token_ids: tuple[int, ...], abilities: Abilities) -> dict[str, Any]:
    """Return SamplingParams' keyword arguments; raises RequestError naming what can't be done.

    One EOS id is `end_id`, further ones are stop ids. The stop id itself is asked for (include_stop_str_in_output:
    else it is cut off [R]). Without a tokenizer `end_id` must be set [L0].
    """
    _check(request, eos_token_ids, abilities)
    stop = request.stop
    eos = () if stop.ignore_eos else eos_token_ids
    kwargs: dict[str, Any] = {
        "end_id": eos_token_ids[0] if eos_token_ids else _NO_END_ID,
        "max_tokens": stop.max_tokens - len(request.resume),
        "ignore_eos": stop.ignore_eos or not eos_token_ids,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
        "n": 1,
        **_drawing(request.sampling),
    }
    if stop_token_ids := sorted({*stop.stop_token_ids, *eos[1:]} - set(eos[:1])):
        kwargs["stop_token_ids"] = stop_token_ids
    if min_tokens := max(0, stop.min_tokens - len(request.resume)):
        kwargs["min_tokens"] = min_tokens
    if request.num_logprobs is not None:
        # 0 means none to older releases [S0: bool(self.logprobs)]: ask for one and keep the chosen token's.
        kwargs["logprobs"] = max(1, request.num_logprobs)
    if PERF_METRICS in abilities.fields:
        kwargs[PERF_METRICS] = True
    if unknown := kwargs.keys() - abilities.fields:
        raise RequestError(f"TensorRT-LLM {abilities.version} can't sample with {min(unknown)}", param=min(unknown))
    return kwargs


def _drawing(sampling: Sampling) -> dict[str, Any]:
    """Greedy is top_k=1: both greedy rules, with and without temperature=0, agree on it [S, S0]. top_k 0 is all."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        kwargs: dict[str, Any] = {"top_k": 1}
    else:
        kwargs = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed & _SEED_MASK,
        }
        if sampling.min_p:
            kwargs["min_p"] = sampling.min_p
    for name, neutral in _PENALTIES.items():
        if (value := _penalty(sampling, name)) != neutral:
            kwargs[name] = value
    return kwargs


_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def _penalty(sampling: Sampling, name: str) -> float:
    values = {
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    return values[name]


def _check(request: GenerateRequest, eos_token_ids: tuple[int, ...], abilities: Abilities) -> None:
    sampling, stop = request.sampling, request.stop
    penalty = next((name for name, neutral in _PENALTIES.items() if _penalty(sampling, name) != neutral), None)
    if penalty is not None and not abilities.has_penalties:
        raise RequestError(
            f"TensorRT-LLM {abilities.version} ignores {penalty}; {PENALTIES_SINCE} and newer apply it", param=penalty
        )
    if not abilities.has_min_p_and_seeds and (ignored := _drawn_by(sampling)):
        raise RequestError(
            f"TensorRT-LLM {abilities.version} ignores {ignored}; {MIN_P_AND_SEEDS_SINCE} and newer apply it",
            param=ignored,
        )
    refuse_inexact_resume(request, "TensorRT-LLM")
    ending = {*stop.stop_token_ids, *(() if stop.ignore_eos else eos_token_ids)}
    if stop.min_tokens > len(request.resume) and ending - set(eos_token_ids[:1]):
        raise RequestError(
            "min_tokens can't be kept by TensorRT-LLM where several ids end the completion: it bans only one of them",
            param="min_tokens",
        )


def _drawn_by(sampling: Sampling) -> str:
    """Return which of min_p and a user's own seed changes what is drawn; "" for neither."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return ""
    if sampling.min_p:
        return "min_p"
    return "seed" if sampling.is_user_seeded else ""
