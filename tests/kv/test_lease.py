"""The lease table against a naive history: a lease is whatever its first end was."""

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import AttemptId
from services.kv.lease import LeaseTable
from services.kv.lease_table import TABLE, render_diagram

PAGE = Path(__file__).parents[2] / "ARCHITECTURE.md"

MAX_S = 8.0
ATTEMPTS = [AttemptId("a"), AttemptId("b")]

steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "renew", "confirm", "revoke", "state", "forget"]),
        st.sampled_from(ATTEMPTS),
        st.floats(0, 3, allow_nan=False),  # time passing before the step
        st.floats(0.1, 12, allow_nan=False),  # lease_s
    ),
    max_size=40,
)


class History:
    """All that happened to one attempt; its state is found by replaying it."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float, float]] = []

    def state(self, now: float) -> str:
        state, expires = "unknown", 0.0
        for what, at, lease_s in [*self.steps, ("state", now, 0.0)]:
            if state == "held" and at >= expires:
                state = "expired"
            if what == "grant" and state == "unknown":
                state, expires = "held", at + min(lease_s, MAX_S)
            elif what == "renew" and state == "held":
                expires = max(expires, at + min(lease_s, MAX_S))
            elif what == "confirm" and state == "held":
                state = "confirmed"
            elif what == "revoke" and state in ("held", "unknown"):
                state = "revoked"
        return state


@given(steps)
def test_the_table_agrees_with_a_replay_of_its_history(steps):
    table = LeaseTable(max_lease_s=MAX_S)
    histories = {attempt: History() for attempt in ATTEMPTS}
    now = 100.0
    for what, attempt, passed_s, lease_s in steps:
        now += passed_s
        history = histories[attempt]
        before = history.state(now)
        history.steps.append((what, now, lease_s))
        after = history.state(now)
        match what:
            case "grant":
                granted = table.grant(attempt, lease_s=lease_s, now=now, remember_until=1e9)
                assert granted == (before == "unknown")
            case "renew":
                assert table.renew(attempt, lease_s=lease_s, now=now) == after
            case "confirm":
                assert table.confirm(attempt, now) == (before in ("held", "confirmed"))
            case "revoke":
                assert table.revoke(attempt, now, remember_until=1e9) == (before == "held")
            case "forget":
                table.forget(now)
        for other, known in histories.items():
            assert table.state(other, now) == known.state(now)
        assert table.num_held == sum(known.state(now) == "held" for known in histories.values())


def test_expiry_is_final_even_when_it_is_noticed_late():
    table = LeaseTable(max_lease_s=10)
    table.grant(ATTEMPTS[0], lease_s=1, now=0, remember_until=100)
    assert table.expires_at(ATTEMPTS[0]) == 1
    assert table.renew(ATTEMPTS[0], lease_s=5, now=1) == "expired"
    assert not table.confirm(ATTEMPTS[0], 1)
    assert not table.grant(ATTEMPTS[0], lease_s=5, now=1, remember_until=100)
    assert table.expires_at(ATTEMPTS[0]) is None


def test_a_verdict_is_remembered_as_long_as_promised_and_a_held_lease_always():
    table = LeaseTable(max_lease_s=1000)
    table.grant(ATTEMPTS[0], lease_s=500, now=0, remember_until=10)
    table.grant(ATTEMPTS[1], lease_s=500, now=0, remember_until=10)
    assert table.confirm(ATTEMPTS[0], 1)
    table.forget(9)
    assert table.confirm(ATTEMPTS[0], 9)
    table.forget(10)
    assert table.state(ATTEMPTS[0], 10) == "unknown"
    assert table.state(ATTEMPTS[1], 10) == "held"


def test_forgetting_takes_as_long_as_what_is_forgotten_not_as_what_is_remembered():
    """Six hundred seconds of attempts are remembered, and it is the event loop that forgets."""
    table = LeaseTable(max_lease_s=10)
    for number in range(200_000):
        table.revoke(AttemptId(str(number)), 0, remember_until=600)
    table.revoke(AttemptId("old"), 0, remember_until=1)
    started = time.perf_counter()
    for _ in range(100):
        table.forget(5)
    assert time.perf_counter() - started < 0.1
    assert table.state(AttemptId("old"), 5) == "unknown"
    assert table.state(AttemptId("0"), 5) == "revoked"
    table.forget(600)
    assert table.state(AttemptId("0"), 600) == "unknown"


def test_the_diagram_on_the_page_is_the_tables():
    page = PAGE.read_text()
    assert page.split("<!-- lease -->\n")[1].split("<!-- /lease -->")[0].strip() == render_diagram()


def test_every_turn_of_the_table_is_taken_and_whatever_isnt_there_changes_nothing():
    """Each state meets each turn, through the table's own methods."""
    turns = {
        "grant": lambda table, now: table.grant(ATTEMPTS[0], lease_s=5, now=now, remember_until=1e9),
        "renew": lambda table, now: table.renew(ATTEMPTS[0], lease_s=5, now=now),
        "confirm": lambda table, now: table.confirm(ATTEMPTS[0], now),
        "revoke": lambda table, now: table.revoke(ATTEMPTS[0], now, remember_until=1e9),
        "expire": lambda table, now: table.state(ATTEMPTS[0], now + 6),
    }
    ways = {
        "unknown": [],
        "held": ["grant"],
        "confirmed": ["grant", "confirm"],
        "expired": ["grant", "expire"],
        "revoked": ["grant", "revoke"],
    }
    for state, way in ways.items():
        for turn, take in turns.items():
            table, now = LeaseTable(max_lease_s=10), 0.0
            for step in way:
                turns[step](table, now)
            now += 6 if state == "expired" else 0
            assert table.state(ATTEMPTS[0], now) == state
            take(table, now)
            assert table.state(ATTEMPTS[0], now + (6 if turn == "expire" else 0)) == TABLE.get((state, turn), state)


def test_every_end_of_a_lease_is_final():
    ends = {after for after in TABLE.values() if after != "held"}
    assert ends == {"confirmed", "expired", "revoked"}
    assert not any(state in ends for state, _ in TABLE)
