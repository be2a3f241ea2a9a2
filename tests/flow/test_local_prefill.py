"""Conditional disaggregation with real workers: short and mostly cached prompts stay on decode, others don't, and the
text is the same either way."""

import asyncio
import random
import signal
from collections import defaultdict

import pytest

from bus.server import NatsServer
from schemas.explanation import LocalPrefill
from schemas.frames import Decoding, Frame, Prefilling, Tokens
from services.config import HandoffMode
from tests.flow.stack import Outcome, Stack, stack
from tests.flow.test_processes import worker_process

ARGS = {"prefill_ms_per_token": "0.02"}
ON: dict[str, object] = {"kv_local_prefill": True, "kv_max_local_tokens": 64}
SHORT, LONG = 20, 400


def a_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 500) for _ in range(num_tokens)]


async def why(here: Stack, outcome: Outcome) -> LocalPrefill | None:
    explanation = await here.explain(outcome.finished.attempt_id)
    return explanation.choices[0].local


async def until_estimated(here: Stack) -> None:
    """Route prompts until the router knows what a pass costs and that nobody is busy: then a short one stays."""
    seed = 1000
    while True:
        local = await why(here, await here.generate(a_prompt(seed := seed + 1, SHORT), max_tokens=2))
        assert local is not None
        if local.is_taken:
            return


async def settled(here: Stack, prompt: list[int]) -> Outcome:
    """Generate once the router has heard that nobody is busy."""
    await here.all_free()
    await here.reported_idle("d0")
    return await here.generate(prompt)


@pytest.mark.parametrize("handoff", ["pull", "rendezvous"])
async def test_short_and_mostly_cached_prompts_stay_on_decode_and_long_ones_go(
    nats_server: NatsServer, handoff: HandoffMode
) -> None:
    short, long = a_prompt(1, SHORT), a_prompt(2, LONG)
    async with stack(nats_server, "p0", "d0", policy="kv", handoff=handoff, engine_args=ARGS) as here:
        usual = [(await here.generate(prompt)).ids for prompt in (short, long)]
        assert (await here.explain((await here.generate(short)).finished.attempt_id)).choices[0].local is None
    async with stack(nats_server, "p0", "d0", policy="kv", handoff=handoff, engine_args=ARGS, router=ON) as here:
        first = await here.generate(a_prompt(3, LONG))
        assert first.prefilled_by == "p0"
        assert (await why(here, first)) == LocalPrefill(is_taken=False, reason="no estimate")
        await until_estimated(here)
        stays, goes, cached = [await settled(here, prompt) for prompt in (short, long, long)]
        assert [stays.ids, goes.ids, cached.ids] == [*usual, usual[1]]

        assert (stays.prefilled_by, stays.decoded_by, stays.finished.timings.kv_bytes) == ("", "d0", 0)
        told = await why(here, stays)
        assert told is not None
        assert (told.is_taken, told.reason, told.worker, told.uncached_tokens) == (True, "short prompt", "d0", SHORT)
        assert told.local_s < told.remote_s

        assert goes.prefilled_by == "p0"
        assert goes.finished.timings.kv_bytes > 0
        told = await why(here, goes)
        assert told is not None
        assert (told.is_taken, told.reason) == (False, "too long")

        assert (cached.prefilled_by, cached.finished.timings.kv_bytes) == ("", 0)
        assert cached.finished.usage.cached_tokens == (LONG - 1) // 16 * 16
        told = await why(here, cached)
        assert told is not None
        assert (told.is_taken, told.reason) == (True, "mostly cached")
        await here.all_free()


async def test_where_strict_no_prompt_stays(nats_server: NatsServer) -> None:
    async with stack(nats_server, "p0", "d0", policy="kv", is_strict=True, engine_args=ARGS, router=ON) as here:
        for seed in range(3):
            outcome = await here.generate(a_prompt(seed, SHORT))
            assert outcome.prefilled_by == "p0"
            assert (await why(here, outcome)) == LocalPrefill(is_taken=False, reason="strict")


@pytest.mark.slow
async def test_streams_whose_prompts_stayed_survive_their_decode_worker(nats_server: NatsServer) -> None:
    prompts = [a_prompt(50 + number, SHORT) for number in range(6)]
    steady = ARGS | {"decode_ms_per_step": "5"}
    async with (
        stack(nats_server, "p0", "d0", policy="kv", engine_args=steady, router=ON) as here,
        worker_process(here, "d7", "decode") as victim,
    ):
        expected = [(await here.generate(prompt, 300)).ids for prompt in prompts]
        await until_estimated(here)
        seen: defaultdict[str, list[Frame]] = defaultdict(list)

        def note(frame: Frame) -> bool:
            seen[frame.attempt_id].append(frame)
            return False

        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            running = []
            for number, prompt in enumerate(prompts):
                running.append(clients.create_task(here.generate(prompt, 300, on_frame=note)))
                begun = number + 1
                await here.until(lambda begun=begun: _num_begun(seen) == begun)  # type: ignore[misc]
            assert any(_stayed_on(frames) == "d7" for frames in seen.values())
            victim.send_signal(signal.SIGKILL)
        assert [task.result().ids for task in running] == expected
        assert here.resubmits
        await here.all_free()


def _num_begun(seen: dict[str, list[Frame]]) -> int:
    return sum(any(isinstance(frame, Tokens) for frame in frames) for frames in seen.values())


def _stayed_on(frames: list[Frame]) -> str:
    """Return the decode worker that computed the prompt, "" when a prefill worker did."""
    if any(isinstance(frame, Prefilling) for frame in frames):
        return ""
    return next((str(frame.worker) for frame in frames if isinstance(frame, Decoding)), "")
