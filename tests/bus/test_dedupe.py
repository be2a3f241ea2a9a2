"""A duplicate delivery is noticed, and the memory of attempts is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from bus.dedupe import AttemptDedupe
from schemas.ids import AttemptId

A, B, C = AttemptId("a"), AttemptId("b"), AttemptId("c")


def test_an_attempt_is_new_once() -> None:
    dedupe = AttemptDedupe()
    assert dedupe.is_new(A, now=0.0)
    assert not dedupe.is_new(A, now=599.0)
    assert dedupe.is_new(B, now=599.0)


def test_an_attempt_is_forgotten_when_it_expires() -> None:
    dedupe = AttemptDedupe(expiry_s=10.0)
    dedupe.is_new(A, now=0.0)
    assert dedupe.is_new(A, now=10.0)


def test_only_the_newest_attempts_are_remembered() -> None:
    dedupe = AttemptDedupe(max_attempts=2)
    for attempt in (A, B, C):
        dedupe.is_new(attempt, now=0.0)
    assert len(dedupe) == 2
    assert not dedupe.is_new(C, now=0.0)
    assert dedupe.is_new(A, now=0.0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 3))))
def test_within_its_bounds_no_duplicate_passes(arrivals: list[tuple[str, float]]) -> None:
    dedupe = AttemptDedupe(expiry_s=10.0, max_attempts=100)
    seen_at: dict[str, float] = {}
    now = 0.0
    for name, pause_s in arrivals:
        now += pause_s
        is_known = name in seen_at and now - seen_at[name] < 10.0
        assert dedupe.is_new(AttemptId(name), now) == (not is_known)
        if not is_known:
            seen_at[name] = now
