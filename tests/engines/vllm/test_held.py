"""Whose KV is still whose, by a clock that the tests hold."""

import pytest

from schemas.errors import AbortedError, BuswayError, LeaseExpiredError
from schemas.ids import AttemptId
from services.engines.vllm.held import REMEMBER_S, HeldTable

A, B = AttemptId("a" * 22), AttemptId("b" * 22)


@pytest.fixture
def table() -> HeldTable:
    table = HeldTable()
    table.grant(A, "a-p", lease_s=10.0, granted_at=100.0)
    return table


def says(error: BuswayError | None) -> str:
    return "" if error is None else error.message


def test_held_kv_may_be_fetched_and_was_good(table: HeldTable) -> None:
    assert table.check(A) is None
    assert table.confirm(A, 101.0) is None


def test_a_confirmation_is_idempotent_and_uses_the_handoff_up(table: HeldTable) -> None:
    assert table.confirm(A, 101.0) is None
    table.freed(["a-p"], num_expired=0, now=101.1)
    assert table.confirm(A, 102.0) is None
    assert "used already" in says(table.check(A))


def test_kv_freed_without_an_expiry_was_fetched_even_late(table: HeldTable) -> None:
    """A heartbeat may have made the lease longer."""
    table.freed(["a-p"], num_expired=0, now=300.0)
    assert table.confirm(A, 300.1) is None


def test_kv_freed_by_its_lease_is_never_good(table: HeldTable) -> None:
    table.freed(["a-p"], num_expired=1, now=110.0)
    assert isinstance(table.confirm(A, 110.1), LeaseExpiredError)
    assert isinstance(table.check(A), LeaseExpiredError)


def test_another_ones_expiry_doesnt_harm_kv_within_its_lease(table: HeldTable) -> None:
    table.grant(B, "b-p", lease_s=10.0, granted_at=90.0)
    table.freed(["a-p", "b-p"], num_expired=1, now=101.0)
    assert table.confirm(A, 101.5) is None
    assert isinstance(table.confirm(B, 101.5), LeaseExpiredError)


def test_an_aborted_attempts_kv_is_given_up_once(table: HeldTable) -> None:
    assert table.revoke(A, 101.0) == "a-p"
    assert table.revoke(A, 101.0) is None
    assert isinstance(table.confirm(A, 102.0), AbortedError)


def test_kv_in_use_can_be_given_up_until_it_is_confirmed(table: HeldTable) -> None:
    assert table.confirm(A, 101.0) is None
    assert table.revoke(A, 102.0) is None


def test_nothing_is_known_of_strangers_and_of_what_is_long_over(table: HeldTable) -> None:
    assert "isn't known" in says(table.confirm(B, 101.0))
    assert table.revoke(B, 101.0) is None
    table.confirm(A, 101.0)
    table.forget(101.0 + REMEMBER_S)
    assert "isn't known" in says(table.confirm(A, 900.0))
