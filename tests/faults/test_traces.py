"""What a gateway tells of requests that met with trouble: every attempt, and phases that add up."""

import asyncio
import json

import msgspec
import pytest

from schemas.trace import CompletionTrace, Trace
from tests.faults.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
HELD_S = 0.4


async def traced(stack: Stack, id: str) -> CompletionTrace:
    """Return the one completion of a request as `busway trace` tells it; its phases add up."""
    trace = msgspec.convert(json.loads(await stack.command("trace", id, "--json")), Trace)
    (completion,) = trace.completions
    for phases, total_s in [
        (completion.phases, completion.total_s),
        *((one.phases, one.total_s) for one in completion.attempts),
    ]:
        seconds = msgspec.structs.asdict(phases)
        assert min(seconds.values()) >= 0, seconds
        assert sum(seconds.values()) == pytest.approx(total_s)
    return completion


async def test_a_stream_that_went_on_elsewhere_shows_both_attempts(stack: Stack) -> None:
    await stack.have("g0", "r0", "p1", "d1", "d2")
    answer = stack.ask(stack.prompt(), 900, via="http")
    await answer.begun()
    loads = {name: await stack.load(name) for name in ("d1", "d2")}
    (holder,) = [name for name, load in loads.items() if load.running]
    stack[holder].kill()
    (await answer.over()).check_whole()
    completion = await traced(stack, answer.id)
    first, second = completion.attempts
    assert (first.decode_worker, first.reached) == (holder, "streaming")
    assert first.ended_by in ("worker_lost", "no_responders", "stream_broken")
    assert (second.decode_worker, second.reached, second.ended_by) == (
        {"d1": "d2", "d2": "d1"}[holder],
        "streaming",
        "",
    )
    assert completion.phases.retry_s == 0
    assert completion.phases.decode_s > first.phases.decode_s + second.phases.decode_s > 0
    assert second.phases.prefill_s > 0


async def test_an_attempt_that_brought_no_token_is_retry(stack: Stack) -> None:
    await stack.have(*PAIR)
    with stack["p1"].paused("before_prefill"):
        answer = stack.ask(stack.prompt(), via="http")
        await stack["p1"].hit("before_prefill")
        stack["p1"].kill()
    (await answer.over()).check_whole()
    completion = await traced(stack, answer.id)
    first, last = completion.attempts[0], completion.attempts[-1]
    if first is last:  # a rendezvous' decode waited for KV that never came, and computed the prompt itself
        assert stack.handoff == "rendezvous"
        assert completion.phases.transfer_s > 0.1
    else:
        assert first.reached in ("prefilling", "decoding")
        assert first.ended_by
        assert completion.phases.retry_s == pytest.approx(last.sent_s - first.sent_s)
    assert last.reached == "streaming"
    await stack.all_free()


async def test_a_router_that_stands_still_shows_as_queue(stack: Stack) -> None:
    await stack.have(*PAIR)
    async with stack["r0"].frozen():
        answer = stack.ask(stack.prompt(), 2, via="http")
        await asyncio.wait([answer.task], timeout=HELD_S)
    (await answer.over()).check_whole()
    completion = await traced(stack, answer.id)
    seconds = msgspec.structs.asdict(completion.phases)
    assert seconds["queue_s"] > 0.8 * HELD_S
    assert max(seconds, key=lambda name: seconds[name]) == "queue_s", seconds
