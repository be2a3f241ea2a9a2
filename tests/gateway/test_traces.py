"""What a gateway keeps of its requests, and how much of it."""

from schemas.ids import AttemptId
from services.gateway.exchange import Exchange, caller_from_headers
from services.gateway.phases import Phases
from services.gateway.traces import TraceLog


def an_exchange(label: str = "", *, num_choices: int = 1) -> Exchange:
    exchange = Exchange("chat", caller_from_headers({"x-request-id": label}))
    exchange.phases = [Phases(0.0, index) for index in range(num_choices)]
    return exchange


def ended(log: TraceLog, exchange: Exchange) -> Exchange:
    log.begin(exchange)
    exchange.end()
    log.end(exchange)
    return exchange


def test_the_newest_requests_are_kept_and_no_more() -> None:
    log = TraceLog("g", max_requests=3, max_completions=100)
    ids = [ended(log, an_exchange()).caller.request_id for _ in range(5)]
    assert [bool(log.find(id).request_id) for id in ids] == [False, False, True, True, True]
    assert len(log) == 3


def test_requests_of_many_choices_leave_room_for_fewer() -> None:
    log = TraceLog("g", max_requests=100, max_completions=10)
    ids = [ended(log, an_exchange(num_choices=4)).caller.request_id for _ in range(5)]
    assert [bool(log.find(id).request_id) for id in ids] == [False, False, False, True, True]


def test_what_is_under_way_is_kept_whatever_ended_meanwhile() -> None:
    log = TraceLog("g", max_requests=1)
    running = an_exchange("mine")
    log.begin(running)
    for _ in range(3):
        ended(log, an_exchange())
    assert log.find("mine").outcome == "running"
    running.end()
    log.end(running)
    assert log.find("mine").outcome == "ok"
    assert len(log) == 1


def test_of_two_requests_by_one_name_the_newest_is_meant() -> None:
    log = TraceLog("g")
    ended(log, an_exchange("again"))
    newest = ended(log, an_exchange("again"))
    assert log.find("again").request_id == newest.caller.request_id


def test_what_is_kept_of_a_request_is_small_whatever_it_said() -> None:
    exchange = an_exchange("x" * 128)
    exchange.error = "e" * 10**6
    exchange.ignored_fields = tuple(f"field-{number}" for number in range(10**4))
    exchange.end()
    assert (len(exchange.error), exchange.ignored_fields) == (500, ())


def test_a_choice_that_never_ran_ends_with_its_request() -> None:
    log, exchange = TraceLog("g"), an_exchange(num_choices=2)
    exchange.phases[0].sent(AttemptId("a"), "", exchange.caller.received_at)
    ended(log, exchange)
    found = log.find(exchange.caller.request_id)
    assert [one.total_s for one in found.completions] == [one.total_s for one in log.find("a").completions]
