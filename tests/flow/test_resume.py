"""A lost worker: the stream goes on where it was, elsewhere."""

import asyncio
import signal

import pytest

from bus.server import NatsServer
from schemas.frames import Finished, Frame, Tokens
from tests.flow.stack import Outcome, stack
from tests.flow.test_processes import worker_process

STEADY = {"decode_ms_per_step": "5"}
PROMPT = list(range(5, 45))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_decode_worker_killed_in_mid_stream_costs_nobody_a_token(
    server: NatsServer, temperature: float
) -> None:
    async with stack(server, "p1", "d1", engine_args=STEADY) as here, worker_process(here, "d7", "decode") as victim:
        expected = await here.generate(PROMPT, 300, temperature=temperature, num_logprobs=0)
        began: set[str] = set()

        def is_begun(frame: Frame) -> bool:
            if isinstance(frame, Tokens) and frame.seq > 20:
                began.add(frame.attempt_id)
            return False

        async with asyncio.TaskGroup() as clients:
            running = [
                clients.create_task(
                    here.generate(PROMPT, 300, temperature=temperature, num_logprobs=0, on_frame=is_begun)
                )
                for _ in range(4)
            ]
            await here.until(lambda: len(began) == 4)
            victim.send_signal(signal.SIGKILL)
        outcomes = [task.result() for task in running]
        for outcome in outcomes:
            check_whole(outcome, expected)
        assert {outcome.finished.usage.num_resubmits for outcome in outcomes} == {0, 1}
        assert {outcome.finished.usage.cached_tokens for outcome in outcomes} == {32}, "two blocks of the prompt's 40"
        assert here.resubmits == ["worker_lost"] * sum(outcome.finished.usage.num_resubmits for outcome in outcomes)
        await here.all_free()


def check_whole(outcome: Outcome, expected: Outcome) -> None:
    """The very same completion, counted once."""
    assert outcome.ids == expected.ids
    assert outcome.logprobs == expected.logprobs
    usage, wanted = outcome.finished.usage, expected.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (wanted.prompt_tokens, wanted.completion_tokens)
    assert outcome.finished.seq == len(outcome.ids)
    assert [type(frame) for frame in outcome.frames].count(Finished) == 1
    assert not usage.is_resumed
