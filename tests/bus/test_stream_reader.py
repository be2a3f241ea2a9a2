"""StreamReader against a naive model: whatever the wire does, no token twice, no gap unseen, one ending."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus.stream import Gap, StreamReader
from schemas.errors import ErrorRecord, StreamBrokenError
from schemas.frames import (
    Accepted,
    Decoding,
    Failed,
    Finished,
    Frame,
    Prefilling,
    TokenLogprobs,
    Tokens,
    Usage,
)
from schemas.ids import AttemptId, WorkerId

ATTEMPT = AttemptId("a")
P, D = WorkerId("p"), WorkerId("d")
ERROR = ErrorRecord(code="engine_failed", message="x")


def finished(seq: int) -> Finished:
    return Finished(ATTEMPT, seq, "stop", Usage(prompt_tokens=1, completion_tokens=seq))


def sent_frames(lengths: Sequence[int], ending: str, num_resumed: int = 0) -> list[Frame]:
    """Return an honest stream: lifecycle, Tokens frames of these lengths (ids are positions), an ending."""
    frames: list[Frame] = [Accepted(ATTEMPT, "r"), Prefilling(ATTEMPT, P), Decoding(ATTEMPT, D)]
    seq = num_resumed
    for length in lengths:
        ids = tuple(range(seq, seq + length))
        frames.append(Tokens(ATTEMPT, seq, ids, tuple(TokenLogprobs(-float(one)) for one in ids)))
        seq += length
    if ending == "finished":
        frames.append(finished(seq))
    elif ending == "failed":
        frames.append(Failed(ATTEMPT, seq, ERROR))
    return frames


lengths = st.lists(st.integers(1, 4), max_size=8)
endings = st.sampled_from(["finished", "failed", "none"])


@st.composite
def wires(draw: st.DrawFn) -> tuple[list[Frame], list[Frame], int]:
    """Draw (what was sent, what arrives: reordered, duplicated, dropped, and re-cut by a resend, resumed ids)."""
    num_resumed = draw(st.integers(0, 3))
    sent = sent_frames(draw(lengths), draw(endings), num_resumed)
    if draw(st.booleans()):
        sent += [frame for frame in sent_frames(draw(lengths), "none", num_resumed) if isinstance(frame, Tokens)]
    arriving = draw(st.lists(st.sampled_from(sent), max_size=2 * len(sent)))
    if draw(st.booleans()):
        arriving = [frame for frame in sent if draw(st.integers(0, 9)) > 0]
    return sent, arriving, num_resumed


@given(wires())
def test_whatever_arrives_tokens_come_once_in_order_and_it_ends_once(
    wire: tuple[list[Frame], list[Frame], int],
) -> None:
    _, arriving, num_resumed = wire
    reader = StreamReader(ATTEMPT, num_resumed=num_resumed)
    positions: list[int] = []
    endings: list[object] = []
    stages: list[str] = []
    for frame in arriving:
        had_ended = bool(endings)
        is_gap = isinstance(frame, Tokens | Finished) and frame.seq > num_resumed + len(positions)
        try:
            news = reader.feed(frame)
        except StreamBrokenError as error:
            assert not had_ended
            endings.append(error)
            continue
        assert isinstance(news, Gap) == (is_gap and not had_ended)
        assert news is None or not had_ended, "news after the end"
        if isinstance(news, Gap):
            assert reader.next_seq == num_resumed + len(positions) < news.seq
        if isinstance(news, Tokens):
            assert news.seq == num_resumed + len(positions)
            positions += news.token_ids
            assert news.logprobs == tuple(TokenLogprobs(-float(one)) for one in news.token_ids)
        if isinstance(news, Finished | Failed):
            endings.append(news)
        if isinstance(news, Finished):
            assert news.seq == num_resumed + len(positions), "a lost tail went unnoticed"
        stages.append(reader.stage)
    assert positions == list(range(num_resumed, num_resumed + len(positions)))
    assert len(endings) <= 1
    assert reader.is_closed == bool(endings)
    order = ["sent", "accepted", "prefilling", "decoding", "streaming"]
    assert stages == sorted(stages, key=order.index)


@given(lengths, endings, st.data())
@example([1], "finished", None)
def test_duplicates_alone_change_nothing(lengths: list[int], ending: str, data: st.DataObject | None) -> None:
    sent = sent_frames(lengths, ending)
    arriving = [frame for frame in sent for _ in range(data.draw(st.integers(1, 3)) if data else 2)]
    reader = StreamReader(ATTEMPT)
    assert [news for frame in arriving if (news := reader.feed(frame)) is not None] == sent


@given(lengths, st.data())
def test_one_lost_token_frame_is_a_gap_until_it_comes_again(lengths: list[int], data: st.DataObject) -> None:
    sent = sent_frames([*lengths, 1], "finished")
    lost = data.draw(st.sampled_from([frame for frame in sent if isinstance(frame, Tokens)]))
    reader = StreamReader(ATTEMPT)
    news = [reader.feed(frame) for frame in sent if frame is not lost]
    assert isinstance(news[-1], Gap)
    assert not reader.is_closed
    again = [reader.feed(frame) for frame in sent[sent.index(lost) :]]
    assert again == sent[sent.index(lost) :]
    assert reader.is_closed


def test_a_lost_tail_shows_at_the_terminal_frame() -> None:
    reader = StreamReader(ATTEMPT)
    reader.feed(Tokens(ATTEMPT, 0, (0, 1)))
    assert reader.feed(finished(3)) == Gap(3)
    with pytest.raises(StreamBrokenError, match="after 2 tokens"):
        reader.feed(finished(1))
    assert reader.is_closed


def test_a_frame_that_overlaps_delivers_its_new_part_only() -> None:
    reader = StreamReader(ATTEMPT)
    reader.feed(Tokens(ATTEMPT, 0, (0, 1)))
    assert reader.feed(Tokens(ATTEMPT, 1, (1, 2, 3))) == Tokens(ATTEMPT, 2, (2, 3))


def test_a_failure_is_delivered_whatever_is_missing_before_it() -> None:
    reader = StreamReader(ATTEMPT)
    assert reader.feed(Failed(ATTEMPT, 7, ERROR)) == Failed(ATTEMPT, 7, ERROR)
    assert reader.feed(finished(0)) is None


def test_late_lifecycle_frames_are_not_delivered_but_their_senders_are_noted() -> None:
    reader = StreamReader(ATTEMPT)
    assert reader.feed(Decoding(ATTEMPT, D)) is not None
    assert reader.feed(Prefilling(ATTEMPT, P)) is None
    assert reader.feed(Accepted(ATTEMPT, "r")) is None
    assert (reader.router, reader.prefill_worker, reader.decode_worker) == ("r", P, D)


def test_resumed_ids_count_from_the_start() -> None:
    reader = StreamReader(ATTEMPT, num_resumed=5)
    assert StreamReader(ATTEMPT).feed(Tokens(ATTEMPT, 5, (5,))) == Gap(5)
    assert reader.feed(Tokens(ATTEMPT, 4, (4, 5))) == Tokens(ATTEMPT, 5, (5,))
