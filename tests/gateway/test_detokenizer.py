"""Streamed text is the text of all ids decoded at once, however the ids come."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer
from tests.gateway.vocabularies import all_kinds, byte_level_json

KINDS = {name: (Tokenizer(text), HuggingFaceTokenizer.from_str(text)) for name, text in all_kinds().items()}
BYTE_LEVEL = [name for name in KINDS if name in ("byte_level", "smollm2")]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
EMOJI = st.lists(
    st.sampled_from(["👩‍👩‍👧‍👦", "🙂", "é", "e\u0301", "日本", " ", "\n\n", "ß", "a", "the ", "🏳️‍🌈"]), max_size=20
).map("".join)


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Return the pieces for ids that come in batches cut at these places."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(places)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=UNICODE | EMOJI, cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_streamed_text_equals_decoding_all_ids_at_once(kind: str, text: str, cuts: list[int]) -> None:
    ours, theirs = KINDS[kind]
    ids = theirs.encode(text).ids
    assert "".join(stream(ours.detokenizer(), ids, cuts)) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_any_ids_at_all_stream_to_what_they_decode_to(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    ours, theirs = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, theirs.get_vocab_size() - 1), max_size=30))
    assert "".join(stream(ours.detokenizer(), ids, cuts)) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@settings(deadline=None, max_examples=60)
@given(text=UNICODE | EMOJI)
def test_no_piece_of_valid_text_ever_holds_a_replacement_character(kind: str, text: str) -> None:
    ours, theirs = KINDS[kind]
    ids = theirs.encode(text).ids
    assume("\ufffd" not in text)
    assume(theirs.decode(ids) == text)  # SmolLM2's vocabulary lacks some bytes, which are lost in encoding
    pieces = stream(ours.detokenizer(), ids, list(range(len(ids))))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_a_character_split_over_tokens_comes_when_it_is_whole() -> None:
    ours, theirs = KINDS["byte_level"]
    ids = theirs.encode("\U0001f9ff").ids
    assert len(ids) > 1
    detokenizer = ours.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["\U0001f9ff"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end_as_decoding_shows_them() -> None:
    ours, theirs = KINDS["byte_level"]
    ids = theirs.encode("\U0001f9ff").ids[:-1]
    detokenizer = ours.detokenizer()
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == theirs.decode(ids)


def test_special_tokens_are_not_shown() -> None:
    tokenizer = Tokenizer(byte_level_json())
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=True)
    assert tokenizer.detokenizer().push(ids) == "hello"
    assert tokenizer.token_bytes(ids[0]) == b"<|im_start|>"


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@settings(deadline=None)
@given(text=UNICODE | st.text("\x04\x06a", max_size=400))
def test_no_text_has_fewer_tokens_than_the_lower_bound(kind: str, text: str) -> None:
    ours, _ = KINDS[kind]
    assert ours.fewest_tokens(text) <= len(ours.encode(text, add_special_tokens=False))


def test_the_lower_bound_rules_out_texts_far_beyond_any_context() -> None:
    assert KINDS["byte_level"][0].fewest_tokens("x" * 20_000_000) > 100_000
    assert KINDS["word_piece"][0].fewest_tokens("x" * 20_000_000) == 0
