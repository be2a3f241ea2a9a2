"""Frames become messages: one a subject and step, none above the payload limit."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import Decoding, Failed, Finished, Frame, Tokens, Usage, decode_frames, encode_frames
from schemas.ids import WorkerId
from services.worker.outlet import split
from tests.worker.legs import attempt, some_tokens


def test_a_step_is_one_message() -> None:
    frames: list[Frame] = [Decoding(attempt(1), WorkerId("d")), some_tokens(3)]
    assert list(split(frames, 1024)) == [encode_frames(frames)]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 3), st.integers(300, 4000))
def test_a_large_step_is_cut_without_losing_or_moving_a_token(sizes: list[int], num_top: int, limit: int) -> None:
    frames: list[Frame] = []
    seq = 0
    for size in sizes:
        frames.append(some_tokens(size, seq=seq, num_top=num_top))
        seq += size
    frames.append(Finished(attempt(1), seq, "length", Usage(prompt_tokens=1, completion_tokens=seq)))
    messages = list(split(frames, limit))
    assert all(len(message) <= limit for message in messages)
    got = [frame for message in messages for frame in decode_frames(message)]
    tokens = [frame for frame in got if isinstance(frame, Tokens)]
    assert [token for frame in tokens for token in frame.token_ids] == [
        token for size in sizes for token in range(size)
    ]
    starts = [frame.seq for frame in tokens]
    assert starts == [sum(len(frame.token_ids) for frame in tokens[:index]) for index in range(len(tokens))]
    assert all(frame.logprobs is None or len(frame.logprobs) == len(frame.token_ids) for frame in tokens)
    assert isinstance(got[-1], Finished)


def test_a_token_that_is_too_large_alone_becomes_a_failure_with_both_numbers() -> None:
    (message,) = split([some_tokens(1, seq=4, num_top=200)], 600)
    (frame,) = decode_frames(message)
    assert isinstance(frame, Failed)
    assert frame.error.code == "payload_too_large"
    assert "600 bytes" in frame.error.message
