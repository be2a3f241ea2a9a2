"""What a worker can send again: everything it sent, from any token it still keeps."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import Finished, Tokens, Usage
from schemas.ids import AttemptId
from services.worker.sent_frames import KEEP_S, MAX_ENDED, SentFrames

A = AttemptId("a")


def finished(seq: int) -> Finished:
    return Finished(A, seq, "stop", Usage(prompt_tokens=1, completion_tokens=seq))


@given(
    lengths=st.lists(st.integers(1, 3), max_size=12),
    num_resumed=st.integers(0, 3),
    is_ended=st.booleans(),
    from_seq=st.integers(0, 40),
    max_frames=st.integers(1, 20),
)
def test_whatever_is_kept_is_whole_from_the_token_asked_for(
    lengths: list[int], num_resumed: int, is_ended: bool, from_seq: int, max_frames: int
) -> None:
    sent = SentFrames(max_frames)
    sent.begin(A, "s", num_resumed)
    frames: list[Tokens | Finished] = []
    seq = num_resumed
    for length in lengths:
        frames.append(Tokens(A, seq, tuple(range(seq, seq + length))))
        seq += length
    if is_ended:
        frames.append(finished(seq))
    for frame in frames:
        sent.note(A, frame)
    found = sent.since(A, from_seq)
    first_kept = frames[-max_frames].seq if len(frames) > max_frames else num_resumed
    if from_seq < first_kept:
        assert found is None
        return
    assert found is not None
    subject, again = found
    assert subject == "s"
    ids = [one for frame in again if isinstance(frame, Tokens) for one in frame.token_ids]
    assert [one for one in ids if one >= from_seq] == list(range(from_seq, seq))
    assert (bool(again) and isinstance(again[-1], Finished)) == is_ended


def test_an_end_is_kept_for_a_while_and_not_for_ever() -> None:
    sent = SentFrames()
    for number in range(3):
        attempt = AttemptId(str(number))
        sent.begin(attempt, "s", 0)
        sent.note(attempt, finished(0))
        sent.end(attempt, float(number))
    assert sent.since(AttemptId("0"), 0) is not None
    sent.end(AttemptId("2"), KEEP_S + 1.5)
    assert [sent.since(AttemptId(str(number)), 0) is not None for number in range(3)] == [False, False, True]


def test_the_number_of_ended_attempts_kept_is_bounded() -> None:
    sent = SentFrames()
    for number in range(MAX_ENDED + 10):
        sent.begin(AttemptId(str(number)), "s", 0)
        sent.end(AttemptId(str(number)), 0.0)
    assert len(sent) == MAX_ENDED


def test_an_aborted_attempt_is_forgotten_at_once() -> None:
    sent = SentFrames()
    sent.begin(A, "s", 0)
    sent.note(A, Tokens(A, 0, (1,)))
    sent.forget(A)
    sent.note(A, Tokens(A, 1, (1,)))
    sent.end(A, 0.0)
    assert sent.since(A, 0) is None
    assert len(sent) == 0
