"""Whoever keeps sending for an attempt that was given up is told, and told again, but not once a frame."""

from bus.life_events import Holder
from bus.strays import MAX_REMEMBERED, Strays
from schemas.frames import Accepted, Decoding, Finished, Tokens, Usage
from schemas.ids import AttemptId, WorkerId

ATTEMPT = AttemptId("a")
D, R = Holder("worker", "d"), Holder("router", "r")


def test_holders_are_told_once_when_they_show_themselves() -> None:
    strays = Strays()
    assert strays.tell(ATTEMPT, (R,), 0.0) == [R]
    assert strays.hear(Accepted(ATTEMPT, "r"), 0.1) == []
    assert strays.hear(Decoding(ATTEMPT, WorkerId("d")), 0.1) == [D]
    assert strays.hear(Decoding(ATTEMPT, WorkerId("d")), 5.0) == []


def test_tokens_that_keep_coming_tell_all_again_once_a_second() -> None:
    strays = Strays()
    strays.tell(ATTEMPT, (R, D), 0.0)
    told = [strays.hear(Tokens(ATTEMPT, number, (1,)), number / 10) for number in range(25)]
    assert [at for at, holders in enumerate(told) if holders] == [10, 20]
    assert told[10] == [R, D]
    assert strays.hear(Finished(ATTEMPT, 9, "stop", Usage(prompt_tokens=1, completion_tokens=9)), 9.0) == []


def test_tokens_of_attempts_nobody_knows_are_dropped_in_silence() -> None:
    assert Strays().hear(Tokens(ATTEMPT, 0, (1,)), 0.0) == []


def test_the_memory_is_bounded() -> None:
    strays = Strays()
    for number in range(MAX_REMEMBERED + 1):
        strays.tell(AttemptId(str(number)), (D,), 0.0)
    assert strays.hear(Tokens(AttemptId("0"), 0, (1,)), 5.0) == []
    assert strays.hear(Tokens(AttemptId("1"), 0, (1,)), 5.0) == [D]
