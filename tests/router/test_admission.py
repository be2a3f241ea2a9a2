"""Which estimates are refused, by which limit, and with what hint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import AdmissionError
from schemas.request import Deadlines
from services.router.admission import LEAST_RETRY_S, Estimate, as_error, refusal

NOW = 1000.0
ESTIMATE = Estimate(prefill_s=2.0, ttft_s=2.5)


@pytest.mark.parametrize(
    ("deadlines", "max_ttft_s", "reason", "limit_s"),
    [
        (Deadlines(), 2.0, "max_ttft", 2.0),
        (Deadlines(first_token=NOW + 1.0), 0.0, "first_token_deadline", 1.0),
        (Deadlines(first_token=NOW + 1.0), 2.0, "first_token_deadline", 1.0),
        (Deadlines(total=NOW + 2.25), 0.0, "total_deadline", 2.25),
        (Deadlines(prefill=NOW + 1.5), 0.0, "prefill_deadline", 1.5),
    ],
)
def test_the_tightest_limit_refuses_with_estimate_and_limit_in_the_message(
    deadlines: Deadlines, max_ttft_s: float, reason: str, limit_s: float
) -> None:
    refused = refusal(ESTIMATE, deadlines, NOW, max_ttft_s)
    assert refused is not None
    estimate_s = 2.0 if reason == "prefill_deadline" else 2.5
    assert (refused.reason, refused.estimate_s, refused.limit_s) == (reason, estimate_s, limit_s)
    assert refused.retry_after_s == estimate_s - limit_s
    error = as_error(refused)
    assert isinstance(error, AdmissionError)
    assert (error.http_status, error.phase, error.retry_after_s) == (429, "queue", refused.retry_after_s)
    assert f"{estimate_s:.3f} s" in error.message
    assert f"{limit_s:.3f} s" in error.message
    assert reason in error.message


@pytest.mark.parametrize(
    ("deadlines", "max_ttft_s"),
    [
        (Deadlines(), 0.0),
        (Deadlines(), 2.5),
        (Deadlines(first_token=NOW + 2.5, prefill=NOW + 2.0, total=NOW + 600.0), 3.0),
        (Deadlines(first_token=NOW - 1.0), 0.0),  # that is a deadline's own error
        (Deadlines(queue=NOW + 0.1, transfer=NOW + 0.1, inter_token_s=0.1), 0.0),
    ],
)
def test_what_is_expected_in_time_is_taken(deadlines: Deadlines, max_ttft_s: float) -> None:
    assert refusal(ESTIMATE, deadlines, NOW, max_ttft_s) is None


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_request_is_refused_exactly_when_some_limit_is_passed(
    prefill_s: float, move_s: float, first_token_s: float, max_ttft_s: float
) -> None:
    estimate = Estimate(prefill_s=prefill_s, ttft_s=prefill_s + move_s)
    refused = refusal(estimate, Deadlines(first_token=first_token_s), 0.0, max_ttft_s)
    assert (refused is not None) == (estimate.ttft_s > min(first_token_s, max_ttft_s))
    if refused is not None:
        assert refused.retry_after_s >= LEAST_RETRY_S
        assert refused.limit_s == min(first_token_s, max_ttft_s)
