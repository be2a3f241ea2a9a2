"""The frames of a completion: numbered without a gap, whatever steps they come in."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import EngineError
from schemas.frames import Failed, Finished, Timings, Tokens, Usage
from services.engines.adapter.frames import CompletionFrames, usage_of
from tests.engines.scenes import a_request

STEPS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), max_size=8)


@given(resume=st.lists(st.integers(0, 9), max_size=5).map(tuple), steps=STEPS, fails=st.booleans())
def test_each_frame_begins_where_the_one_before_it_ended(
    resume: tuple[int, ...], steps: list[tuple[int, ...]], fails: bool
) -> None:
    request = a_request((1, 2, 3), max_tokens=64, resume=resume)
    frames = CompletionFrames(request)
    told: list[Tokens] = [frames.tokens(step, None) for step in steps]
    delivered = list(resume)
    for frame in told:
        assert (frame.attempt_id, frame.seq) == (request.attempt_id, len(delivered))
        delivered += frame.token_ids
    end: Finished | Failed
    if fails:
        end = frames.failed(EngineError("it failed"))
        assert end.error.message == "it failed"
    else:
        counts = usage_of(request, frames.num_tokens, 0, is_remote=False)
        end = frames.finished("stop", counts, Timings())
        assert end.usage.completion_tokens == len(delivered)
    assert (end.attempt_id, end.seq) == (request.attempt_id, len(delivered))
    assert delivered == [*resume, *(token_id for step in steps for token_id in step)]


def test_a_prompt_is_computed_but_for_its_cached_part() -> None:
    request = a_request(range(10), resume=(1, 2))
    assert usage_of(request, 5, 4, is_remote=False) == Usage(
        prompt_tokens=10, completion_tokens=5, cached_tokens=4, num_computed_prompt_tokens=6
    )


def test_a_prompt_that_came_over_was_not_computed_here() -> None:
    request = a_request(range(10))
    assert usage_of(request, 5, 4, is_remote=True) == Usage(
        prompt_tokens=10, completion_tokens=5, cached_tokens=4, num_computed_prompt_tokens=0
    )


def test_a_hit_that_covers_resumed_ids_too_is_at_most_the_prompt() -> None:
    counts = usage_of(a_request(range(10), resume=(1, 2, 3)), 5, 12, is_remote=False)
    assert (counts.cached_tokens, counts.num_computed_prompt_tokens) == (10, 0)
