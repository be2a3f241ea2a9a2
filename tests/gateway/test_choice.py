"""Frames in, text out: counts, reasons and logprobs do not depend on how the ids were grouped into frames."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ErrorRecord
from schemas.frames import Failed, Finished, FinishReason, Frame, TokenLogprobs, Tokens, Usage
from schemas.ids import AttemptId
from services.gateway.choice import LOWEST_LOGPROB, Choice, ChoiceDelta
from services.gateway.logprobs import chat_logprobs, completion_logprobs
from services.gateway.rendering import Heading, WholeChoice, renderer_for
from services.gateway.tokenizer import Tokenizer
from services.gateway.usage import PromptChoices, usage_of
from tests.gateway.vocabularies import IM_END, byte_level_json

TOKENIZER = Tokenizer(byte_level_json())
ATTEMPT = AttemptId("attempt")
HEADING = Heading(id="id", created=1, model="m", fingerprint="fp")


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def tokens(ids: list[int], seq: int = 0, *, has_logprobs: bool = False) -> Tokens:
    scores = tuple(TokenLogprobs(-float(i), ((i, -float(i)),)) for i in ids) if has_logprobs else None
    return Tokens(ATTEMPT, seq, tuple(ids), scores)


def finished(num_tokens: int, reason: FinishReason = "length", *, cached: int = 0) -> Finished:
    usage = Usage(prompt_tokens=3, completion_tokens=num_tokens, cached_tokens=cached)
    return Finished(ATTEMPT, num_tokens, reason, usage)


def run(choice: Choice, steps: list[list[Frame]]) -> list[ChoiceDelta]:
    """Feed steps as the gateway does: up to the first finish."""
    deltas = []
    for step in steps:
        delta = choice.feed(step)
        if delta is not None:
            deltas.append(delta)
        if choice.finish_reason is not None:
            break
    return deltas


@settings(deadline=None, max_examples=80)
@given(
    text=st.text("ab \n🙂é", max_size=30),
    stops=st.lists(st.text("ab \n🙂", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
    has_logprobs=st.booleans(),
)
def test_the_grouping_of_ids_changes_nothing(text: str, stops: list[str], cuts: list[int], has_logprobs: bool) -> None:
    ids = ids_of(text)
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    steps: list[list[Frame]] = [[tokens(ids[a:b], a, has_logprobs=has_logprobs)] for a, b in pairwise(places)]
    steps[-1].append(finished(len(ids)))
    one_by_one: list[list[Frame]] = [[tokens([i], n, has_logprobs=has_logprobs)] for n, i in enumerate(ids)]
    one_by_one.append([finished(len(ids))])
    outcomes = []
    for way in (steps, one_by_one):
        choice = Choice(0, TOKENIZER.detokenizer(), stop_strings=stops, has_logprobs=has_logprobs)
        deltas = run(choice, way)
        scores = [score for delta in deltas for score in delta.scores]
        outcomes.append(("".join(d.text for d in deltas), choice.finish_reason, choice.num_tokens, scores))
        assert len(scores) == (choice.num_tokens if has_logprobs else 0)
        assert sum(d.num_tokens for d in deltas) == choice.num_tokens
    assert outcomes[0] == outcomes[1]
    if not any(stop in text for stop in stops):
        assert outcomes[0][:3] == (text, "length", len(ids))


def test_the_id_that_ends_a_completion_is_counted_but_not_shown() -> None:
    stop_id = ids_of("z")[0]
    choice = Choice(0, TOKENIZER.detokenizer(), end_ids={stop_id, IM_END})
    deltas = run(choice, [[tokens([*ids_of("ab"), stop_id])], [finished(3, "stop")]])
    assert "".join(delta.text for delta in deltas) == "ab"
    assert choice.num_tokens == len(ids_of("ab")) + 1


def test_a_stop_string_wins_over_the_end_that_comes_with_it() -> None:
    choice = Choice(0, TOKENIZER.detokenizer(), stop_strings=["b"])
    deltas = run(choice, [[tokens(ids_of("a b c d")), finished(7, "length")]])
    assert ("".join(delta.text for delta in deltas), choice.finish_reason) == ("a ", "stop")
    assert choice.is_stopped_by_string
    assert choice.num_tokens < 7


def test_a_step_without_tokens_is_no_delta_and_a_failure_is_not_for_it() -> None:
    choice = Choice(0, TOKENIZER.detokenizer())
    assert choice.feed([]) is None
    with pytest.raises(TypeError):
        choice.feed([Failed(ATTEMPT, 0, ErrorRecord(code="x", message="y"))])


def test_minus_infinity_is_written_as_openai_writes_it() -> None:
    choice = Choice(0, TOKENIZER.detokenizer(), has_logprobs=True)
    frame = Tokens(ATTEMPT, 0, (70,), (TokenLogprobs(float("-inf"), ((5, float("-inf")),)),))
    delta = choice.feed([frame])
    assert delta is not None
    assert delta.scores[0].logprob == LOWEST_LOGPROB
    json.dumps(chat_logprobs(delta.scores, TOKENIZER.token_bytes), allow_nan=False)


def test_tokens_that_are_parts_of_a_character_have_different_names() -> None:
    choice = Choice(0, TOKENIZER.detokenizer(), has_logprobs=True)
    delta = choice.feed([tokens(ids_of("\U0001f9ff"), has_logprobs=True)])
    assert delta is not None
    chat: Any = chat_logprobs(delta.scores, TOKENIZER.token_bytes)
    legacy: Any = completion_logprobs(delta.scores, TOKENIZER.token_bytes)
    assert b"".join(bytes(entry["bytes"]) for entry in chat["content"]).decode() == "\U0001f9ff"
    assert all(entry["token"].startswith("\\x") for entry in chat["content"])
    assert all(name.startswith("bytes:\\x") for name in legacy["tokens"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("has_usage", [False, True])
def test_every_chunk_is_json_with_the_shared_heading(endpoint: Any, has_usage: bool) -> None:
    heading = Heading(id='i"d', created=1, model="m\n", fingerprint="fp", has_usage=has_usage)
    renderer = renderer_for(endpoint, heading, TOKENIZER.token_bytes)
    delta = ChoiceDelta(2, 'text "\u2028\x00', (), "stop", 1)
    for chunk in [*renderer.first(2), *renderer.delta(delta), *renderer.last({"prompt_tokens": 1}, {"a": 1})]:
        assert b"\n" not in chunk
        document = json.loads(chunk)
        assert (document["id"], document["model"]) == ('i"d', "m\n")
        assert ("usage" in document) == (has_usage or document["choices"] == [])
    assert renderer.last(None, None) == []


def test_usage_counts_a_prompt_once_and_the_least_prefix_hit() -> None:
    choices = []
    for cached in (16, 0, 16):
        choice = Choice(0, TOKENIZER.detokenizer())
        run(choice, [[tokens([70, 71])], [finished(2, cached=cached)]])
        choices.append(choice)
    assert usage_of([PromptChoices(20, choices)]) == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    unfinished = Choice(0, TOKENIZER.detokenizer())
    assert "prompt_tokens_details" not in usage_of([PromptChoices(20, [*choices, unfinished])])


def test_a_whole_choice_collects_what_the_stream_would_have_shown() -> None:
    whole = WholeChoice(0, "", [])
    for delta in (ChoiceDelta(0, "a"), ChoiceDelta(0, "b", (), "stop")):
        whole.add(delta)
    document = json.loads(renderer_for("chat", HEADING, TOKENIZER.token_bytes).document([whole], {}, None))
    assert document["choices"][0]["message"]["content"] == "ab"
    assert document["choices"][0]["finish_reason"] == "stop"
