"""A worker's measure of a leg and its engine's word of it make timings that take exactly as long as the leg did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import Timings
from services.phase_timings import waited_for
from services.worker.leg_clock import LegClock

SECONDS = st.floats(0.0, 100.0)
BEFORE = Timings(route_s=0.1, prefill_queue_s=0.2, prefill_s=0.3)


def test_what_the_engine_doesnt_claim_of_the_time_until_the_first_token_was_spent_on_it() -> None:
    clock = LegClock(10.0, BEFORE)
    own = Timings(decode_queue_s=1.0, transfer_s=2.0, decode_s=5.0, overlap_s=0.5, kv_bytes=7)
    clock.first_token_at = 13.25
    assert clock.decoded(own, 18.25) == Timings(
        route_s=0.1,
        prefill_queue_s=0.2,
        prefill_s=0.3,
        decode_queue_s=1.0,
        transfer_s=2.0,
        first_token_s=0.25,
        decode_s=5.0,
        overlap_s=0.5,
        kv_bytes=7,
    )


def test_of_a_prefill_that_had_begun_before_the_leg_came_only_what_the_leg_saw_counts() -> None:
    """A rendezvous: decode was asked 0.5 s after prefill, and waited 2.5 s in all."""
    clock = LegClock(10.0, Timings(route_s=0.6))
    own = Timings(prefill_queue_s=0.4, prefill_s=2.0, transfer_s=0.6)
    found = clock.decoded(own, 12.5)
    assert (found.prefill_queue_s, found.prefill_s, found.transfer_s) == (0.0, pytest.approx(1.9), 0.6)
    assert (found.first_token_s, found.route_s) == (0.0, 0.6)


def test_a_prompt_computed_here_adds_to_what_came_with_the_leg() -> None:
    found = LegClock(10.0, BEFORE).decoded(Timings(prefill_s=1.0), 11.0)
    assert (found.prefill_queue_s, found.prefill_s) == (0.2, pytest.approx(1.3))


def test_all_of_a_prefill_leg_that_was_no_queue_was_prefill() -> None:
    assert LegClock(10.0).prefilled(Timings(prefill_queue_s=1.0, prefill_s=1.5), 13.0) == Timings(
        prefill_queue_s=1.0, prefill_s=2.0
    )
    assert LegClock(10.0).prefilled(Timings(prefill_queue_s=1.0), 10.5) == Timings(prefill_queue_s=0.5)


@given(
    own=st.builds(Timings, prefill_queue_s=SECONDS, prefill_s=SECONDS, decode_queue_s=SECONDS, transfer_s=SECONDS),
    held_s=SECONDS,
)
def test_a_legs_timings_are_never_negative_and_take_as_long_as_it_did(own: Timings, held_s: float) -> None:
    found = LegClock(1000.0).decoded(own, 1000.0 + held_s)
    assert waited_for(found) == pytest.approx(held_s, abs=1e-9)
    assert min(found.prefill_queue_s, found.prefill_s, found.decode_queue_s, found.transfer_s) >= 0
    assert found.first_token_s >= 0
    assert found.transfer_s <= own.transfer_s
