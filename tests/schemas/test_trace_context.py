"""W3C trace contexts: which count, and how a request goes on with one or begins its own."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import RequestId, new_request_id
from schemas.trace_context import continued, span_id, trace_id, well_formed

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GIVEN[:-1],
        GIVEN.upper(),
        GIVEN.replace("0af", "0xf"),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{GIVEN}-more",
        f"{GIVEN}\n",
        f"01-{TRACE}-{SPAN}-01more",
        "é" * 55,
    ],
)
def test_what_isnt_well_formed_doesnt_count(text: str) -> None:
    assert well_formed(text) == ""


def test_a_newer_version_counts_as_far_as_it_is_understood() -> None:
    assert well_formed(GIVEN) == GIVEN
    assert well_formed(f"cc-{TRACE}-{SPAN}-01") == GIVEN
    assert well_formed(f"cc-{TRACE}-{SPAN}-01-what-will-be") == GIVEN


def test_a_request_goes_on_in_its_callers_trace_under_a_span_of_its_own() -> None:
    request = new_request_id()
    own = continued(well_formed(f"00-{TRACE}-{SPAN}-00"), request)
    assert (trace_id(own), own[-2:]) == (TRACE, "00")
    assert span_id(own) != SPAN
    assert well_formed(own) == own


def test_a_trace_that_begins_here_has_the_requests_own_name() -> None:
    request = new_request_id()
    own = continued("", request)
    assert bytes.fromhex(trace_id(own)) == base64.urlsafe_b64decode(f"{request}==")
    assert well_formed(own) == own


@given(st.text(min_size=1, max_size=128))
def test_any_request_id_makes_a_well_formed_context(id: str) -> None:
    own = continued("", RequestId(id))
    assert well_formed(own) == own
