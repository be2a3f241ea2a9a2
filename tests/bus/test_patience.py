"""Pauses grow, are capped, and never bring many requests back at one moment; silence is asked about less and less."""

import random

from hypothesis import given
from hypothesis import strategies as st

from bus.patience import Patience, Quiet, Recovery

PATIENCE = Patience()
jitters = st.floats(0.0, 1.0, exclude_max=True)


@given(jitter=jitters)
def test_a_lost_request_goes_out_soon_and_each_refusal_makes_it_wait_longer_up_to_a_cap(jitter: float) -> None:
    recovery = Recovery(PATIENCE, lambda: jitter)
    recovery.lost(100.0)
    pauses = [recovery.send_at - 100.0]
    for _ in range(12):
        assert recovery.refused(100.0, is_final=False, is_outage=False)
        pauses.append(recovery.send_at - 100.0)
    assert 0 < pauses[0] < 0.08
    assert pauses == sorted(pauses)
    assert pauses[-1] <= 1.5 * PATIENCE.max_pause_s


def test_a_hundred_lost_requests_are_spread() -> None:
    moments = []
    for number in range(100):
        recovery = Recovery(PATIENCE, random.Random(number).random)
        recovery.lost(0.0)
        moments.append(recovery.send_at)
    assert max(moments) - min(moments) > 0.8 * PATIENCE.pause_s
    assert len(set(moments)) == 100


def test_a_request_that_was_held_looks_for_a_taker_for_a_while_and_through_any_outage() -> None:
    recovery = Recovery(PATIENCE, lambda: 0.5)
    recovery.lost(0.0)
    assert recovery.refused(9.9, is_final=False, is_outage=False)
    assert not recovery.refused(10.1, is_final=False, is_outage=False)
    assert recovery.refused(60.0, is_final=False, is_outage=True)
    recovery.reconnected(60.0)
    assert recovery.refused(69.0, is_final=False, is_outage=False)
    assert not recovery.refused(69.0, is_final=True, is_outage=False)


def test_one_that_nobody_ever_held_is_refused_after_three_tries() -> None:
    recovery = Recovery(PATIENCE, lambda: 0.5)
    assert [recovery.refused(0.0, is_final=False, is_outage=True) for _ in range(3)] == [True, True, False]


@given(jitter=jitters, num=st.integers(0, 40))
def test_silence_is_asked_about_less_and_less_until_something_comes(jitter: float, num: int) -> None:
    quiet = Quiet(PATIENCE, lambda: jitter, 0.0)
    for _ in range(num):
        quiet.reassured(0.0)
    assert quiet.ask_at == min(2.0 * 2**num, 30.0)
    quiet.suspect(0.0)
    assert 0.4 <= quiet.ask_at <= 0.8
    quiet.heard(1.0, is_backlog=True)
    assert quiet.is_suspect
    quiet.heard(1.0, is_backlog=False)
    assert quiet.ask_at == 3.0
