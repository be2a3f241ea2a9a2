"""SGLang: deaths, each of which costs an engine's start. Moments are staged by stopping a scheduler process: SGLang
then waits for its peer, as it would for minutes."""

import os
import signal
import time

import psutil
import pytest

from schemas.frames import Failed
from tests.conformance.engines import only
from tests.conformance.pair import Desk, WorkerProcess
from tests.conformance.prompts import prompt

pytestmark = [only("sglang"), pytest.mark.slow]

NOTICED_S = 6.0  # two seconds and a busy machine; SGLang itself would need eleven


def engine_processes(worker: WorkerProcess) -> list[psutil.Process]:
    return psutil.Process(worker.pid).children(recursive=True)


def scheduler_of(worker: WorkerProcess) -> psutil.Process:
    (scheduler,) = [one for one in engine_processes(worker) if "scheduler" in one.name() + " ".join(one.cmdline())]
    return scheduler


async def serves(desk: Desk, salt: int) -> None:
    request = desk.request(prompt(45, salt=salt), 4)
    assert (await desk.disaggregated(request)).ids == (await desk.aggregated(request)).ids


async def test_prefill_killed_while_decode_waits_for_it(desk: Desk) -> None:
    prefill = desk.pair.prefill
    await desk.beat(prefill)  # the death of a peer that was never heard is no news
    own = engine_processes(prefill)
    os.kill(scheduler_of(prefill).pid, signal.SIGSTOP)
    request = desk.request(prompt(80, salt=341), 6)
    bootstrap = await desk.params(request)
    await desk.ask_decode(request, bootstrap)
    prefill.kill()
    began = time.monotonic()
    outcome = await desk.outcome(request.attempt_id)
    assert time.monotonic() - began < NOTICED_S
    assert isinstance(outcome.end, Failed)
    await desk.until_free(45.0)  # SGLang keeps pages that a peer might still write to for half a minute
    assert not psutil.wait_procs(own, timeout=5.0)[1], "SGLang's processes outlived their worker"
    desk.pair.ensure_alive()
    await serves(desk, 342)


async def test_decode_killed_while_prefill_waits_for_it(desk: Desk) -> None:
    decode = desk.pair.decode
    await desk.beat(decode)
    os.kill(scheduler_of(decode).pid, signal.SIGSTOP)
    request = desk.request(prompt(80, salt=343), 6)
    bootstrap = await desk.params(request)
    await desk.ask_decode(request, bootstrap)
    decode.kill()
    await desk.until(lambda: desk.result(request.attempt_id) is not None, NOTICED_S)
    await desk.until_free(5.0)
    desk.pair.ensure_alive()
    await serves(desk, 344)


async def test_an_engine_whose_scheduler_dies_takes_its_worker_with_it(desk: Desk) -> None:
    """Its streams end with an error, not with silence."""
    decode = desk.pair.decode
    request = desk.request(prompt(60, salt=345), 1500)
    await desk.ask_decode(request, await desk.params(request))
    await desk.until(lambda: desk.num_tokens(request.attempt_id) >= 3)
    scheduler_of(decode).kill()
    outcome = await desk.outcome(request.attempt_id)
    assert isinstance(outcome.end, Failed)
    assert await decode.wait_left() != 0
    desk.pair.ensure_alive()
    await serves(desk, 346)
