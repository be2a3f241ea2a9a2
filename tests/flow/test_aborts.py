"""Whoever closes a stream, in whatever phase: both legs are free at once, and the next request isn't kept waiting."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from bus.server import NatsServer
from schemas.errors import DeadlineError
from schemas.frames import Accepted, Decoding, Frame, Prefilling, Tokens
from schemas.request import Deadlines
from services.config import HandoffMode
from tests.flow.stack import stack

SLOW = {"prefill_ms_per_token": "1", "decode_ms_per_step": "10", "max_batched_tokens": "32"}
STEP_S = 0.032
LONG_PROMPT = tuple(range(3, 1003))
HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]


@pytest.mark.parametrize("phase", [Accepted, Prefilling, Decoding, Tokens])
@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_client_that_leaves_frees_both_legs(
    server: NatsServer, handoff: HandoffMode, phase: type[Frame]
) -> None:
    async with stack(server, "p1", "d1", handoff=handoff, engine_args=SLOW) as here:
        prompt = LONG_PROMPT if phase in (Accepted, Prefilling) else LONG_PROMPT[:40]
        await here.generate(prompt, 500, on_frame=lambda frame: isinstance(frame, phase))
        left = time.monotonic()
        await here.all_free()
        assert time.monotonic() - left < 0.1 + 2 * STEP_S + 0.15  # the last for a busy machine
        assert (await here.generate([5, 6, 7], 3)).finished.usage.completion_tokens == 3
        await here.all_free()


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_ten_cancelled_long_prompts_dont_delay_a_short_one(server: NatsServer, handoff: HandoffMode) -> None:
    async with stack(server, "p1", "d1", handoff=handoff, engine_args=SLOW) as here:
        async with asyncio.TaskGroup() as clients:
            for number in range(10):
                clients.create_task(
                    here.generate((number + 3, *LONG_PROMPT), 50, on_frame=lambda frame: isinstance(frame, Prefilling))
                )
        began = time.monotonic()
        await here.generate([5, 6, 7], 2)
        assert time.monotonic() - began < 1.0  # each of the ten would have taken one
        await here.all_free()


@pytest.mark.parametrize("point", ["before_prefill", "before_ticket", "mid_transfer", "before_confirm"])
async def test_a_client_that_leaves_at_a_named_point_frees_both_legs(
    server: NatsServer, tmp_path: Path, point: str
) -> None:
    async with stack(server, "p1", "d1", engine_args={"pause_dir": str(tmp_path)}) as here:
        pause = tmp_path / f"{point}.pause"
        pause.touch()
        async with asyncio.TaskGroup() as clients:
            client = clients.create_task(here.generate(list(range(3, 60)), 30))
            await here.until((tmp_path / f"{point}.hit").exists)
            client.cancel()
        pause.unlink()
        await here.all_free()
        assert (await here.generate([5, 6, 7], 3)).finished.reason == "length"


@pytest.mark.parametrize("workers", [("p1", "d1"), ("b1",)])
@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_deadline_ends_the_request_in_its_phase(
    server: NatsServer, handoff: HandoffMode, workers: tuple[str, ...]
) -> None:
    async with stack(server, *workers, handoff=handoff, engine_args=SLOW) as here:
        for name, phases in (
            ("prefill", {"prefill"}),
            ("total", {"total"}),
            ("first_token", {"prefill", "transfer"}),
        ):
            deadlines = msgspec.structs.replace(Deadlines(), **{name: time.time() + 0.2})
            with pytest.raises(DeadlineError) as caught:
                await here.generate(LONG_PROMPT, 50, deadlines=deadlines)
            assert caught.value.phase in phases
            await here.all_free()
        with pytest.raises(DeadlineError):
            await here.generate([5, 6], 500, deadlines=Deadlines(total=time.time() + 0.3))
        await here.all_free()
