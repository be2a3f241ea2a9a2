"""Workers of one model whose sequences may be of different lengths: a request goes only to those that hold it."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from bus.patience import Patience
from bus.server import NatsServer
from schemas.errors import ContextOverflowError, UnavailableError, WorkerLostError
from schemas.frames import Frame, Tokens
from services.config import PolicyName
from tests.flow.stack import Stack, stack, start_worker, until_ready
from tests.flow.test_processes import worker_process

SMALL = {"max_context_tokens": "20"}
PROMPT = list(range(5, 45))


@contextlib.asynccontextmanager
async def joined(here: Stack, *names: str, **engine_args: str) -> AsyncIterator[None]:
    """Let these workers join; they leave on the way out."""
    async with asyncio.TaskGroup() as tasks:
        members = [start_worker(here, tasks, name, engine_args=engine_args) for name in names]
        await until_ready(here)
        try:
            yield
        finally:
            for member in members:
                member.stop.set()


@pytest.mark.parametrize("policy", ["least_loaded", "queue", "kv"])
async def test_a_smaller_worker_takes_what_fits_it_and_limits_nobody(server: NatsServer, policy: PolicyName) -> None:
    async with stack(server, "p1", "d1", policy=policy) as here, joined(here, "p2", "d2", **SMALL):
        long = [await here.generate(PROMPT, 8) for _ in range(6)]
        assert {(one.prefilled_by, one.decoded_by) for one in long} == {("p1", "d1")}
        assert all(len(one.ids) == 8 for one in long)
        async with asyncio.TaskGroup() as clients:
            running = [clients.create_task(here.generate(PROMPT[number:][:12], 8)) for number in range(24)]
        assert {task.result().decoded_by for task in running} == {"d1", "d2"}
        with pytest.raises(ContextOverflowError, match="exceed the 32768 tokens"):
            await here.generate(PROMPT, 40_000)
        await here.all_free()


async def test_a_lost_stream_goes_on_where_it_fits_or_waits_for_such_a_worker(server: NatsServer) -> None:
    async with (
        stack(server, "p1") as here,
        joined(here, "d1", **SMALL),
        worker_process(here, "d7", "decode") as victim,
    ):
        began = asyncio.Event()

        def note(frame: Frame) -> bool:
            if isinstance(frame, Tokens) and frame.seq > 4:
                began.set()
            return False

        async with asyncio.TaskGroup() as clients:
            lost = clients.create_task(here.generate(PROMPT, 100, on_frame=note))
            await began.wait()
            victim.send_signal(signal.SIGKILL)
            await here.fleet.wait_for(lambda fleet: "d7" not in fleet.workers, 5.0)
            async with joined(here, "d2"):
                outcome = await lost
        assert len(outcome.ids) == 100
        assert outcome.finished.usage.num_resubmits >= 1, "more where d7 was asked again before its death was noticed"


async def test_a_lost_stream_that_fits_nobody_who_is_left_ends_by_name(server: NatsServer) -> None:
    """With the numbers, or with the worker that was lost where the router refused what came to it before."""
    patience = Patience(recovery_s=0.5)
    async with (
        stack(server, "p1", patience=patience) as here,
        joined(here, "d1", **SMALL),
        worker_process(here, "d7", "decode") as victim,
    ):

        def kill(frame: Frame) -> bool:
            if isinstance(frame, Tokens) and frame.seq > 4 and victim.returncode is None:
                victim.kill()
            return False

        with pytest.raises((UnavailableError, WorkerLostError), match=r"max_tokens=100 exceed the 20 tokens|\bd7\b"):
            await here.generate(PROMPT, 100, on_frame=kill)
