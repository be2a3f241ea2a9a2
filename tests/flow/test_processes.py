"""What only a process of its own can suffer: being killed, and being stopped and woken."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from bus.server import NatsServer
from schemas.errors import WorkerLostError
from schemas.frames import Failed, Frame, Tokens, decode_frames
from schemas.hop import AcceptedHop
from tests.flow.stack import Stack, a_request, stack, start_worker, until_ready


@contextlib.asynccontextmanager
async def worker_process(here: Stack, name: str, role: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.flow.worker_process", here.server.internal_url, here.namespace, name, role, "5"
    )
    try:
        await here.fleet.wait_for(lambda fleet: name in fleet.workers, 15.0)
        await until_ready(here)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_worker_stopped_and_woken_drops_its_attempts_before_anything_else(server: NatsServer) -> None:
    async with stack(server) as here, worker_process(here, "b7", "both") as process:
        frames: list[Frame] = []
        await here.bus.listen(f"{here.bus.inbox}.raw.s", lambda subject, payload: frames.extend(decode_frames(payload)))
        request = a_request(here, [5, 6, 7], 30_000)
        await here.bus.ask(here.bus.subjects.requests("sim"), request, AcceptedHop)
        await here.until(lambda: any(isinstance(frame, Tokens) for frame in frames))
        process.send_signal(signal.SIGSTOP)
        await here.fleet.wait_for(lambda fleet: "b7" not in fleet.workers, 5.0)
        await asyncio.wait({asyncio.ensure_future(asyncio.sleep(1.0))})  # noqa: TID251
        num_before = len(frames)
        process.send_signal(signal.SIGCONT)
        await here.until(lambda: any(isinstance(frame, Failed) for frame in frames))
        after = frames[num_before:]
        failed = next(frame for frame in after if isinstance(frame, Failed))
        assert failed.error.code == WorkerLostError.code
        assert "stood still" in failed.error.message
        assert after[-1] is failed
        await here.fleet.wait_for(lambda fleet: "b7" in fleet.workers, 5.0)
        assert len((await here.generate([5, 6, 7], 4)).ids) == 4


async def test_a_silent_prefill_worker_costs_a_resubmit_and_one_that_comes_again_is_used_at_once(
    server: NatsServer,
) -> None:
    async with stack(server, "d1") as here, worker_process(here, "p7", "prefill") as process:
        ids = (await here.generate([5, 6, 7], 3)).ids
        process.send_signal(signal.SIGSTOP)  # it holds what comes, and is silent
        assert (await here.generate([5, 6, 7], 3)).ids == ids
        assert here.resubmits == [WorkerLostError.code]
        process.kill()
        await here.fleet.wait_for(lambda fleet: "p7" not in fleet.workers, 5.0)
        assert (await here.generate([5, 6, 7], 3)).prefilled_by == ""
        async with asyncio.TaskGroup() as tasks:
            start_worker(here, tasks, "p7")
            await until_ready(here)
            await here.until(lambda: "p7" in here.fleet.workers)
            assert (await here.generate([5, 6, 7], 3)).prefilled_by == "p7"
            await here.all_free()
            here["p7"].stop.set()
