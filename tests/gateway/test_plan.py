"""What each completion is told, at the borders of context, seeds and numbers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ContextOverflowError, RequestError
from schemas.model_card import SamplingDefaults
from services.gateway.openai_request import ChatRequest, parse_chat
from services.gateway.plan import CompletionPlan, Limits, plan_completions

LIMITS = Limits(max_context_tokens=100, vocab_size=1000, max_choices=16)


def request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode())[0]


def plans(num_tokens: int, limits: Limits = LIMITS, **fields: Any) -> list[CompletionPlan]:
    return plan_completions(request(**fields), [[5] * num_tokens], limits, drawn_seed=41)


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    assert plans(60)[0].stop.max_tokens == 40
    assert plans(99)[0].stop.max_tokens == 1
    capped = Limits(max_context_tokens=100, vocab_size=1000, max_choices=16, default_max_tokens=7)
    assert plans(60, capped)[0].stop.max_tokens == 7
    assert plans(96, capped)[0].stop.max_tokens == 4


def test_workers_of_about_one_size_share_what_names_no_max_tokens() -> None:
    """The smallest that leaves at least half of the largest room; a small one shortens nobody's answer."""

    def filled(num_tokens: int, *contexts: int) -> int:
        limits = Limits(max_context_tokens=100, vocab_size=1000, max_choices=16, decode_contexts=contexts)
        return plans(num_tokens, limits)[0].stop.max_tokens

    assert filled(20, 100) == 80
    assert filled(20, 60, 90, 100) == 40
    assert filled(21, 60, 90, 100) == 69
    assert filled(95, 10, 90, 100) == 5
    assert filled(20, 100, 130) == 80  # what no complete path holds


def test_the_model_says_how_to_sample_where_the_user_does_not() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    limits = Limits(max_context_tokens=100, vocab_size=1000, max_choices=16, sampling=defaults)
    found = plans(1, limits, top_p=0.5)[0].sampling
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.5, 20)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1.1)
    off = plans(1, limits, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)[0].sampling
    assert (off.temperature, off.top_p, off.top_k, off.min_p, off.repetition_penalty) == (0, 1, 0, 0, 1)


@given(num_tokens=st.integers(1, 120), wanted=st.none() | st.integers(1, 120))
def test_no_plan_ever_exceeds_the_context(num_tokens: int, wanted: int | None) -> None:
    fits = num_tokens + (wanted or 1) <= 100
    if fits:
        stop = plans(num_tokens, max_tokens=wanted)[0].stop
        assert stop.max_tokens + num_tokens <= 100
        assert wanted is None or stop.max_tokens == wanted
        return
    with pytest.raises(ContextOverflowError, match="100 tokens") as refused:
        plans(num_tokens, max_tokens=wanted)
    assert str(num_tokens) in refused.value.message


def test_max_completion_tokens_goes_before_the_older_name() -> None:
    assert plans(1, max_tokens=5, max_completion_tokens=6)[0].stop.max_tokens == 6


def test_siblings_seeds_follow_one_another_and_wrap() -> None:
    assert [plan.sampling.seed for plan in plans(1, n=2, seed=7)] == [7, 8]
    assert [plan.sampling.seed for plan in plans(1, n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]
    drawn = plans(1, n=2)
    assert [plan.sampling.seed for plan in drawn] == [41, 42]
    assert not drawn[0].sampling.is_user_seeded


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary of 1000"):
        plan_completions(request(), [[1000]], LIMITS, 1)
    with pytest.raises(RequestError, match="stop_token_ids"):
        plans(1, stop_token_ids=[1000])
