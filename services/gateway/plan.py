"""From an OpenAI request and its prompts' ids to the completions to generate. Pure; step 3 of a request's walk."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ContextOverflowError, RequestError
from schemas.model_card import SamplingDefaults
from schemas.request import Sampling, StopConditions
from services.gateway.openai_request import MAX_COMPLETIONS, ChatRequest, CompletionRequest

_SEED_SPAN = 2**64
_MIN_SEED = -(2**63)
_PLAIN = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and this gateway allow; `default_max_tokens` 0 is the rest of a context, see `room`.

    `decode_contexts` are those of single workers.
    """

    max_context_tokens: int
    vocab_size: int
    max_choices: int
    decode_contexts: tuple[int, ...] = ()
    default_max_tokens: int = 0
    sampling: SamplingDefaults = _PLAIN


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """One completion of one prompt: what goes to the bus, n fanned out."""

    index: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    stop: StopConditions


def check_choices(request: ChatRequest | CompletionRequest, num_prompts: int, max_choices: int) -> int:
    """Return n; raises RequestError when it, or n times the prompts, is over the limit."""
    n = request.n or 1
    if n > max_choices:
        raise RequestError(f"n: {n} choices, the limit is {max_choices}", param="n")
    if n * num_prompts > MAX_COMPLETIONS:
        raise RequestError(
            f"n: {num_prompts} prompts x {n} choices are {n * num_prompts} completions, the limit is {MAX_COMPLETIONS}",
            param="n",
        )
    return n


def plan_completions(
    request: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], limits: Limits, drawn_seed: int
) -> list[CompletionPlan]:
    """Return one plan per choice, in index order: prompt by prompt, n each.

    Sibling j of a prompt gets seed + j, so that siblings differ and each can be had again alone; `drawn_seed` is used
    when the user gave none. Raises RequestError naming field and numbers.
    """
    n = check_choices(request, len(prompts), limits.max_choices)
    seed = drawn_seed if request.seed is None else request.seed
    plans: list[CompletionPlan] = []
    for prompt in prompts:
        token_ids = tuple(prompt)
        stop = _stop_conditions(request, token_ids, limits)
        for j in range(n):
            plans.append(CompletionPlan(len(plans), token_ids, _sampling(request, seed + j, limits.sampling), stop))
    return plans


def check_context(num_prompt_tokens: int, wanted_tokens: int | None, max_context_tokens: int, param: str) -> None:
    """Raise ContextOverflowError with the numbers when the prompt and at least one (or `wanted_tokens`) don't fit."""
    if num_prompt_tokens + (wanted_tokens or 1) <= max_context_tokens:
        return
    asked = "1 token of the answer" if wanted_tokens is None else f"max_tokens {wanted_tokens}"
    raise ContextOverflowError(
        f"{param}: the prompt's {num_prompt_tokens} tokens and {asked} "
        f"exceed the model's context of {max_context_tokens} tokens",
        param=param,
    )


def room(num_prompt_tokens: int, limits: Limits) -> int:
    """Return how long an answer may get whose length nobody asked for: the rest of the smallest worker's context that
    is at least half of the largest one's. So workers of about one size share such requests, a small one shortens none.
    """
    largest = limits.max_context_tokens - num_prompt_tokens
    rests = (context - num_prompt_tokens for context in limits.decode_contexts)
    return min((rest for rest in rests if largest / 2 <= rest <= largest), default=largest)


def prompt_field(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _stop_conditions(
    request: ChatRequest | CompletionRequest, token_ids: tuple[int, ...], limits: Limits
) -> StopConditions:
    field = prompt_field(request)
    if not token_ids:
        raise RequestError(f"{field}: the prompt is empty", param=field)
    wanted = request.wanted_tokens
    check_context(len(token_ids), wanted, limits.max_context_tokens, field)
    _check_vocabulary(token_ids, limits.vocab_size, field)
    _check_vocabulary(request.stop_token_ids or (), limits.vocab_size, "stop_token_ids")
    rest = limits.max_context_tokens - len(token_ids)
    max_tokens = wanted or min(limits.default_max_tokens or room(len(token_ids), limits), rest)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens: {min_tokens} is over max_tokens {max_tokens}", param="min_tokens")
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    if vocab_size and token_ids and max(token_ids) >= vocab_size:
        raise RequestError(f"{field}: token id {max(token_ids)} is outside the vocabulary of {vocab_size}", param=field)


def _sampling(request: ChatRequest | CompletionRequest, seed: int, defaults: SamplingDefaults) -> Sampling:
    """Return the user's wishes, and the model's where the user says nothing."""
    return Sampling(
        seed=(seed - _MIN_SEED) % _SEED_SPAN + _MIN_SEED,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=_or(request.min_p, defaults.min_p),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        is_user_seeded=request.seed is not None,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
