"""Exact load: reports plus one's own dispatches that they haven't counted yet."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import Epoch, WorkerId
from schemas.worker import LoadReport
from services.router.loads import UNCOUNTED_LIMIT_S, LoadBook

MINE = Epoch(77)
WORKER = WorkerId("w1")


def report(*, running: int = 0, waiting: int = 0, queued: int = 0, counted: int = 0, epoch: int = 1) -> LoadReport:
    return LoadReport(
        worker_id=WORKER,
        epoch=Epoch(epoch),
        running=running,
        waiting=waiting,
        kv_blocks_used=5,
        kv_blocks_cached=0,
        kv_blocks_total=10,
        queued_prefill_tokens=queued,
        dispatched={str(MINE): counted, "other": 99},
    )


def test_a_dispatch_counts_from_its_sending_on() -> None:
    book = LoadBook(MINE)
    book.add(WORKER, book.next_number(), 100, now=0.0)
    assert book.load(WORKER, 0.0).queued_tokens == 100
    assert book.load(WORKER, 0.0).requests == 1


def test_a_report_that_counted_a_dispatch_replaces_it() -> None:
    book = LoadBook(MINE)
    first, second = book.next_number(), book.next_number()
    book.add(WORKER, first, 100, now=0.0)
    book.add(WORKER, second, 50, now=0.0)
    book.report(report(running=1, queued=80, counted=first))
    load = book.load(WORKER, 0.0)
    assert (load.requests, load.queued_tokens, load.kv_used) == (2, 130, 0.5)


def test_a_report_that_came_before_the_ack_is_not_counted_twice() -> None:
    book = LoadBook(MINE)
    number = book.next_number()
    book.report(report(running=1, queued=100, counted=number))
    book.add(WORKER, number, 100, now=0.0)
    assert book.load(WORKER, 0.0).queued_tokens == 100


def test_a_dispatch_that_nobody_held_is_given_back() -> None:
    book = LoadBook(MINE)
    number = book.next_number()
    book.add(WORKER, number, 100, now=0.0)
    book.give_back(WORKER, number)
    assert book.load(WORKER, 0.0).requests == 0


def test_a_dispatch_lost_on_the_way_stops_counting_after_two_seconds() -> None:
    book = LoadBook(MINE)
    book.add(WORKER, book.next_number(), 100, now=0.0)
    assert book.load(WORKER, UNCOUNTED_LIMIT_S + 0.1).requests == 0


def test_a_report_of_an_older_epoch_is_dropped() -> None:
    book = LoadBook(MINE)
    book.report(report(running=1, epoch=2))
    book.report(report(running=9, epoch=1))
    assert book.load(WORKER, 0.0).requests == 1


def test_a_worker_that_left_is_forgotten_with_what_came_too_late_of_others() -> None:
    book, other = LoadBook(MINE), WorkerId("w2")
    book.report(report(running=3))
    book.forget(WORKER, live={other})
    book.report(report(running=3))
    book.suspect(WORKER)
    book.add(other, book.next_number(), 10, now=0.0)
    book.forget(WorkerId("w3"), live={other})
    assert book.workers == {other}
    assert book.load(WORKER, 0.0).requests == 0
    assert book.load(other, 0.0).queued_tokens == 10


def test_a_silent_worker_is_suspect_until_it_reports() -> None:
    book = LoadBook(MINE)
    book.suspect(WORKER)
    assert book.load(WORKER, 0.0).is_suspect
    book.report(report())
    assert not book.load(WORKER, 0.0).is_suspect


@given(st.lists(st.tuples(st.sampled_from(["send", "finish", "report"]), st.integers(1, 500)), max_size=60))
def test_the_book_equals_a_worker_that_counts_all_it_was_sent(steps: list[tuple[str, int]]) -> None:
    """A worker of its own book-keeping: whenever it reports, the router knows exactly what it has in flight."""
    book = LoadBook(MINE)
    in_flight: dict[int, int] = {}
    arrived = 0
    sent: dict[int, int] = {}
    for step, size in steps:
        if step == "send":
            number = book.next_number()
            book.add(WORKER, number, size, now=0.0)
            sent[number] = size
        elif step == "finish" and in_flight:
            in_flight.pop(min(in_flight))
        else:
            in_flight.update({number: tokens for number, tokens in sent.items() if number > arrived})
            arrived = max(sent, default=0)
            book.report(report(running=len(in_flight), queued=sum(in_flight.values()), counted=arrived))
            assert book.load(WORKER, 0.0).queued_tokens == sum(in_flight.values())
    fresh = {number: tokens for number, tokens in sent.items() if number > arrived}
    assert book.load(WORKER, 0.0).requests >= len(fresh)
