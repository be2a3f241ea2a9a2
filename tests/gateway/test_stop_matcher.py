"""Stop strings are found wherever the text was split, and nothing of them is shown."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop_matcher import StopMatcher

ALPHABET = "ab\n🙂"
TEXT = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character; the first stop string that is complete ends the text where it starts."""
    for end in range(1, len(text) + 1):
        hits = sorted((end - len(stop), stop) for stop in stops if text[:end].endswith(stop))
        if hits:
            return text[: hits[0][0]], hits[0][1]
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_any_split_gives_what_reading_by_character_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces_of(text, cuts))
    shown += matcher.flush()
    assert (shown, matcher.matched) == naive(text, stops)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += matcher.push(piece)
        assert naive(text, stops)[0].startswith(shown)


def test_only_what_may_become_a_stop_string_is_withheld() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abcST") == "abc"
    assert matcher.push("X") == "STX"
    assert matcher.push("STO") == ""
    assert matcher.flush() == "STO"


def test_after_a_hit_everything_is_swallowed() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
