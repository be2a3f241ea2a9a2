"""The usage object: what is counted once and what per choice. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.choice import Choice


@dataclass(frozen=True, slots=True)
class PromptChoices:
    """A prompt's length in tokens and its n completions."""

    prompt_tokens: int
    choices: Sequence[Choice]


def usage_of(prompts: Sequence[PromptChoices]) -> dict[str, object]:
    """Return OpenAI's usage. A prompt counts once however many choices it has.

    cached_tokens is prefill's prefix hit, of the sibling that found least: with n > 1 the later ones hit what the
    first has just computed. Where the gateway itself ended a choice nobody told it, and the details are left out.
    """
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(choice.num_tokens for prompt in prompts for choice in prompt.choices)
    usage: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    cached = [_cached_tokens(prompt) for prompt in prompts]
    if None not in cached:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(tokens for tokens in cached if tokens is not None)}
    return usage


def _cached_tokens(prompt: PromptChoices) -> int | None:
    found = [choice.usage.cached_tokens for choice in prompt.choices if choice.usage is not None]
    return min(found) if len(found) == len(prompt.choices) else None
