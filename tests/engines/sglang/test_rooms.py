"""Who may meet whom in a prefill worker's rooms."""

import msgspec
import pytest

from schemas.errors import AbortedError, BuswayError, EngineError, KvMismatchError, RequestError, WorkerLostError
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.peer import MeetRequest
from services.engines.sglang.rooms import REMEMBER_S, RoomBook

EPOCH = Epoch(7)
ATTEMPT = AttemptId("a" * 22)
OTHER = AttemptId("b" * 22)
MEET = MeetRequest(
    attempt_id=ATTEMPT,
    room=5,
    epoch=EPOCH,
    decode_worker=WorkerId("d"),
    decode_epoch=Epoch(1),
    num_tokens=3,
    prompt_digest="same",
    block_ids=(),
)


@pytest.fixture
def book() -> RoomBook:
    book = RoomBook(EPOCH)
    book.open(ATTEMPT, 5, "same")
    return book


def test_the_first_meeting_is_news_and_asking_again_is_not(book: RoomBook) -> None:
    assert book.decode_of(ATTEMPT) is None
    assert book.meet(MEET)
    assert not book.meet(MEET)
    assert book.decode_of(ATTEMPT) == (WorkerId("d"), Epoch(1))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt_digest": "another"}, KvMismatchError),
        ({"room": 6}, WorkerLostError),
        ({"attempt_id": OTHER}, WorkerLostError),
        ({"epoch": Epoch(6)}, WorkerLostError),
    ],
)
def test_strangers_never_meet(book: RoomBook, changes: dict[str, object], error: type[BuswayError]) -> None:
    with pytest.raises(error):
        book.meet(msgspec.structs.replace(MEET, **changes))
    assert book.meet(MEET), "the stranger took nobody's place"


@pytest.mark.parametrize("changes", [{"decode_worker": WorkerId("e")}, {"decode_epoch": Epoch(2)}])
def test_a_room_is_for_one_decode_leg(book: RoomBook, changes: dict[str, object]) -> None:
    book.meet(MEET)
    with pytest.raises(KvMismatchError, match="another decode leg"):
        book.meet(msgspec.structs.replace(MEET, **changes))


def test_a_room_is_used_once_also_when_it_is_over(book: RoomBook) -> None:
    with pytest.raises(RequestError, match="room 5"):
        book.open(OTHER, 5, "same")
    book.meet(MEET)
    book.delivered(ATTEMPT, 100.0)
    book.forget(100.0 + REMEMBER_S - 1)
    with pytest.raises(RequestError):
        book.open(OTHER, 5, "same")
    book.forget(100.0 + REMEMBER_S)
    book.open(OTHER, 5, "same")


def test_what_became_of_it_is_told_for_a_while(book: RoomBook) -> None:
    book.meet(MEET)
    book.failed(ATTEMPT, EngineError("out of luck"), 1.0)
    with pytest.raises(EngineError, match="out of luck"):
        book.meet(MEET)


def test_an_abort_before_anybody_came_refuses_who_comes_late(book: RoomBook) -> None:
    book.failed(ATTEMPT, None, 1.0)
    with pytest.raises(AbortedError):
        book.meet(MEET)


def test_a_delivered_room_stays_good_whatever_comes_later(book: RoomBook) -> None:
    book.meet(MEET)
    book.delivered(ATTEMPT, 1.0)
    book.failed(ATTEMPT, EngineError("too late"), 2.0)
    assert not book.meet(MEET)
