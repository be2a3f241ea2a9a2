"""Phases add up, whatever is reported, lost or late."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import Accepted, Begun, Decoding, Finished, Frame, Prefilling, Timings, Tokens, Usage
from schemas.ids import AttemptId, WorkerId
from schemas.trace import PhaseSeconds
from services.gateway.phases import Phases

FIRST, SECOND = AttemptId("first"), AttemptId("second")
TOLD = Timings(
    route_s=0.02,
    prefill_queue_s=0.1,
    prefill_s=0.2,
    decode_queue_s=0.03,
    transfer_s=0.04,
    first_token_s=0.005,
    overlap_s=0.01,
    kv_bytes=9,
)
SECONDS = st.floats(0.0, 100.0)


def parts(phases: PhaseSeconds) -> dict[str, float]:
    return msgspec.structs.asdict(phases)


def ttft_of(phases: PhaseSeconds) -> float:
    return sum(parts(phases).values()) - phases.decode_s


def finished(attempt: AttemptId, timings: Timings) -> Finished:
    return Finished(attempt, 2, "stop", Usage(prompt_tokens=1, completion_tokens=2, num_resubmits=1), timings)


def heard(phases: Phases, attempt: AttemptId, sent_at: float, *, timings: Timings | None = TOLD) -> None:
    """An attempt that brings its first token 0.5 s after it was sent."""
    phases.sent(attempt, "", sent_at)
    phases.observe([Accepted(attempt, "r")], sent_at + 0.01)
    phases.observe([Prefilling(attempt, WorkerId("p"))], sent_at + 0.02)
    phases.observe([Decoding(attempt, WorkerId("d"))], sent_at + 0.4)
    begun: list[Frame] = [] if timings is None else [Begun(attempt, timings)]
    phases.observe([*begun, Tokens(attempt, 0, (1,))], sent_at + 0.5)


def test_what_is_reported_counts_and_the_rest_was_on_the_bus() -> None:
    phases = Phases(10.0)
    heard(phases, FIRST, 10.1)
    phases.end(12.5)
    found = phases.seconds(99.0)
    assert parts(found) == pytest.approx(
        {
            "gateway_s": 0.1,
            "retry_s": 0.0,
            "queue_s": 0.01,
            "route_s": 0.02,
            "prefill_queue_s": 0.1,
            "prefill_s": 0.2,
            "decode_queue_s": 0.03,
            "transfer_s": 0.04,
            "first_token_s": 0.5 - 0.01 - 0.02 - 0.1 - 0.2 - 0.03 - 0.04,
            "unreported_s": 0.0,
            "decode_s": 1.9,
        }
    )
    trace = phases.trace(99.0)
    assert (trace.ttft_s, trace.total_s) == (pytest.approx(0.6), pytest.approx(2.5))
    assert (trace.kv_bytes, trace.overlap_s) == (9, 0.01)
    (attempt,) = trace.attempts
    assert (attempt.router, attempt.prefill_worker, attempt.decode_worker) == ("r", "p", "d")
    assert (attempt.reached, attempt.ended_by, attempt.sent_s) == ("streaming", "", pytest.approx(0.1))


def test_the_answers_own_object_adds_up_to_the_last_digit() -> None:
    phases = Phases(10.0)
    heard(phases, FIRST, 10.1)
    phases.observe([finished(FIRST, TOLD)], 10.7)
    phases.end(10.7)
    told: dict[str, Any] = phases.render(10.8)
    names = PhaseSeconds.__struct_fields__
    assert told["total_s"] == round(sum(told[name] for name in names), 6) == 0.7
    assert told["ttft_s"] == round(sum(told[name] for name in names if name != "decode_s"), 6) == 0.6
    assert (told["num_resubmits"], told["kv_bytes"], told["decode_worker"]) == (1, 9, "d")


def test_an_engine_that_tells_only_at_the_end_is_heard_too() -> None:
    phases = Phases(10.0)
    heard(phases, FIRST, 10.0, timings=None)
    assert phases.seconds(10.6).unreported_s == pytest.approx(0.49)
    phases.observe([finished(FIRST, TOLD)], 11.0)
    phases.end(11.0)
    assert (phases.seconds(99.0).prefill_s, phases.seconds(99.0).unreported_s) == (0.2, 0.0)


def test_an_end_that_the_owner_made_up_says_nothing_of_time() -> None:
    phases = Phases(10.0)
    heard(phases, FIRST, 10.0)
    phases.observe([finished(FIRST, Timings())], 11.0)
    phases.end(11.0)
    assert phases.seconds(99.0).prefill_s == 0.2


def test_attempts_before_the_first_token_are_retries_and_those_after_it_are_part_of_decode() -> None:
    phases = Phases(10.0)
    phases.sent(FIRST, "", 10.1)
    phases.observe([Accepted(FIRST, "r1")], 10.2)
    phases.observe([Prefilling(FIRST, WorkerId("p1"))], 10.3)
    heard(phases, SECOND, 13.1)
    phases.sent(AttemptId("third"), "worker_lost", 20.0)
    phases.observe([Accepted(AttemptId("third"), "r2")], 20.5)
    phases.end(21.0)
    found = phases.seconds(99.0)
    assert (found.gateway_s, found.retry_s) == (pytest.approx(0.1), pytest.approx(3.0))
    assert (found.prefill_s, found.decode_s) == (0.2, pytest.approx(21.0 - 13.6))
    first, second, third = phases.trace(99.0).attempts
    assert (first.reached, first.ended_by, first.total_s) == ("prefilling", "not_taken", pytest.approx(3.0))
    assert (first.phases.queue_s, first.phases.unreported_s) == (pytest.approx(0.1), pytest.approx(2.9))
    assert (second.reached, second.ended_by, second.phases.decode_s) == ("streaming", "worker_lost", pytest.approx(6.4))
    assert (third.reached, third.ended_by, third.phases.unreported_s) == ("accepted", "", pytest.approx(0.5))


def test_a_slow_reader_hears_of_an_attempt_after_the_next_was_sent() -> None:
    phases = Phases(10.0)
    phases.sent(FIRST, "", 10.0)
    phases.sent(SECOND, "worker_lost", 11.0)
    phases.observe([Accepted(FIRST, "r1"), Begun(FIRST, TOLD), Tokens(FIRST, 0, (1,))], 12.0)
    phases.observe([Tokens(FIRST, 1, (2,))], 12.5)
    phases.observe([Accepted(SECOND, "r2"), Tokens(SECOND, 2, (3,))], 13.0)
    first, second = phases.trace(13.0).attempts
    assert (first.router, second.router) == ("r1", "r2")
    assert phases.first_token_at == 12.0
    assert phases.seconds(13.0).retry_s == 0.0
    assert second.phases.queue_s + second.phases.unreported_s == pytest.approx(2.0)


def test_a_request_that_was_never_sent_was_the_gateways() -> None:
    phases = Phases(10.0)
    phases.end(10.5)
    assert phases.seconds(99.0) == PhaseSeconds(gateway_s=0.5)
    assert phases.trace(99.0).attempts == ()


@given(
    gaps=st.lists(SECONDS, min_size=6, max_size=6),
    told=st.builds(
        Timings,
        route_s=SECONDS,
        prefill_queue_s=SECONDS,
        prefill_s=SECONDS,
        decode_queue_s=SECONDS,
        transfer_s=SECONDS,
        first_token_s=SECONDS,
    )
    | st.none(),
    is_accepted=st.booleans(),
    has_token=st.booleans(),
    num_lost=st.integers(0, 3),
)
def test_phases_are_never_negative_and_always_add_up(
    gaps: list[float], told: Timings | None, is_accepted: bool, has_token: bool, num_lost: int
) -> None:
    """Also where others claim more than there was: their clocks may run faster."""
    moments = [1000.0]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    received, *lost, sent, accepted, first, ended = [moments[0], *[moments[1]] * num_lost, *moments[2:6]]
    phases = Phases(received)
    for number, at in enumerate(lost):
        phases.sent(AttemptId(f"lost-{number}"), "worker_lost", at)
    phases.sent(FIRST, "worker_lost", sent)
    if is_accepted:
        phases.observe([Accepted(FIRST, "r")], accepted)
    if has_token:
        begun: list[Frame] = [] if told is None else [Begun(FIRST, told)]
        phases.observe([*begun, Tokens(FIRST, 0, (1,))], first)
    phases.end(ended)
    trace = phases.trace(ended + 1e6)
    found = trace.phases
    assert min(parts(found).values()) >= 0
    assert sum(parts(found).values()) == pytest.approx(trace.total_s) == pytest.approx(ended - received)
    if has_token:
        assert ttft_of(found) == pytest.approx(trace.ttft_s) == pytest.approx(first - received)
    for one in trace.attempts:
        assert min(parts(one.phases).values()) >= 0
        assert sum(parts(one.phases).values()) == pytest.approx(one.total_s)
    for one, following in pairwise(trace.attempts):
        assert one.sent_s + one.total_s == pytest.approx(following.sent_s)
