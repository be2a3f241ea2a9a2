"""Which attempts a worker holds: dedupe, aborts that overtake, deadlines."""

from schemas.request import Deadlines
from services.worker.deadline_watch import DeadlineWatch
from services.worker.ledger import Ledger, Recent
from tests.worker.legs import a_decode, a_dispatch, a_prefill, attempt


def test_an_attempt_is_taken_once_even_after_it_has_ended() -> None:
    ledger = Ledger(10)
    assert ledger.judge(attempt(1), a_dispatch()) == "new"
    ledger.take(a_decode(1))
    assert ledger.judge(attempt(1), a_dispatch()) == "duplicate"
    ledger.close(attempt(1))
    assert ledger.judge(attempt(1), a_dispatch()) == "duplicate"


def test_an_attempt_that_comes_by_another_router_is_the_first_ones() -> None:
    ledger = Ledger(10)
    ledger.take(a_prefill(1))
    assert ledger.judge(attempt(1), a_dispatch(epoch=8)) == "elsewhere"
    ledger.close(attempt(1))
    assert ledger.judge(attempt(1), a_dispatch(epoch=8)) == "elsewhere"


def test_an_attempt_the_engine_refused_is_refused_again_not_taken_for_held() -> None:
    ledger = Ledger(10)
    ledger.take(a_decode(1))
    ledger.refuse(attempt(1))
    assert ledger.judge(attempt(1), a_dispatch()) == "new"
    assert len(ledger) == 0


def test_an_abort_that_overtakes_its_request_is_remembered() -> None:
    ledger = Ledger(10)
    ledger.aborted(attempt(1))
    assert ledger.judge(attempt(1), a_dispatch()) == "aborted"


def test_a_full_ledger_takes_no_more_but_knows_its_own() -> None:
    ledger = Ledger(2)
    for number in (1, 2):
        ledger.take(a_decode(number))
    assert ledger.judge(attempt(3), a_dispatch()) == "full"
    assert ledger.judge(attempt(2), a_dispatch()) == "duplicate"


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    recent = Recent(3)
    for number in range(5):
        recent.add(attempt(number))
    assert [attempt(number) in recent for number in range(5)] == [False, False, True, True, True]


def test_a_leg_watches_the_deadlines_of_its_own_phase() -> None:
    deadlines = Deadlines(prefill=1.0, transfer=2.0, first_token=3.0, total=9.0, inter_token_s=0.5)
    ledger = Ledger(10)
    prefill = ledger.take(a_prefill(1, deadlines=deadlines)).due()
    assert prefill is not None
    assert (prefill.at, prefill.phase) == (1.0, "prefill")
    entry = ledger.take(a_decode(2, deadlines=deadlines))
    entry.stage, entry.last_token_at = "streaming", 4.0
    due = entry.due()
    assert due is not None
    assert (due.at, due.phase) == (4.5, "decode")


def test_a_deadline_that_moved_back_is_looked_up_again() -> None:
    ledger = Ledger(10)
    watch = DeadlineWatch(ledger, lambda entry, due: None)
    deadlines = Deadlines(first_token=1.0, inter_token_s=1.0)
    for number in (1, 2, 3):
        watch.note(ledger.take(a_decode(number, deadlines=deadlines)))
    streaming = ledger.get(attempt(1))
    assert streaming is not None
    streaming.stage, streaming.last_token_at = "streaming", 0.9
    ledger.close(attempt(2))
    assert [entry.attempt_id for entry, _ in watch.pop(1.5)] == [attempt(3)]
    streaming.last_token_at = 1.8
    assert list(watch.pop(2.0)) == []
    assert [(entry.attempt_id, due.at) for entry, due in watch.pop(3.0)] == [(attempt(1), 2.8)]
    assert list(watch.pop(9.0)) == []


def test_ended_attempts_are_not_kept_until_their_far_deadlines() -> None:
    ledger = Ledger(10)
    watch = DeadlineWatch(ledger, lambda entry, due: None)
    deadlines = Deadlines(total=1e12)
    watch.note(ledger.take(a_decode(1, deadlines=deadlines)))
    for number in range(2, 20_000):
        watch.note(ledger.take(a_decode(number, deadlines=deadlines)))
        ledger.close(attempt(number))
    assert len(watch) < 2048
    assert [entry.attempt_id for entry, _ in watch.pop(1e12)] == [attempt(1)]
