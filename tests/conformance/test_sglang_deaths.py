"""SGLang: deaths and departures, each of which costs an engine's start. Moments are staged by stopping a scheduler
process: SGLang then waits for its peer, as it would for minutes."""

import asyncio
import json
import os
import signal
import time
from typing import Any

import aiohttp
import psutil
import pytest

from deploy.draining import drain_worker
from schemas.errors import WorkerLostError
from schemas.frames import Failed
from tests.conformance.engines import only
from tests.conformance.front import front, until_ready
from tests.conformance.pair import MODEL, Desk, WorkerProcess, namespace
from tests.conformance.prompts import prompt

pytestmark = [only("sglang"), pytest.mark.slow]

GRACE_S = 1.0
LEAVING_S = 5.0  # of which the engine's own end is the most
NUM_TOKENS = 1500  # at least three times as long as the grace
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


async def test_a_decode_that_leaves_hands_on_what_outlasts_its_grace(desk: Desk) -> None:
    """Whoever holds a stream hears that it may go on elsewhere, and after which token; a gateway has it go on there."""
    decode = desk.pair.decode
    own = engine_processes(decode)
    request = desk.request(prompt(60, salt=347), NUM_TOKENS)
    async with front(desk.pair.server, namespace(desk.pair.case)) as url, aiohttp.ClientSession(url) as http:
        await until_ready(http)
        async with asyncio.TaskGroup() as tasks:
            has_begun = asyncio.Event()
            streamed = tasks.create_task(finish_of(http, has_begun))
            await has_begun.wait()
            await desk.ask_decode(request, await desk.params(request))
            await desk.until(lambda: desk.num_tokens(request.attempt_id) >= 3)
            began = time.monotonic()
            await drain_worker(desk.bus, decode.id, grace_s=GRACE_S)
            assert time.monotonic() - began < GRACE_S + LEAVING_S
            outcome = await desk.outcome(request.attempt_id)
    assert isinstance(outcome.end, Failed)
    assert outcome.end.error.code == WorkerLostError.code
    assert outcome.end.seq == len(outcome.ids) < NUM_TOKENS
    assert streamed.result() == ("length", NUM_TOKENS, 1)
    assert await decode.wait_left() == 0
    assert not psutil.wait_procs(own, timeout=5.0)[1], "SGLang's processes outlived their worker"
    await desk.until_free(45.0)
    desk.pair.ensure_alive()
    await serves(desk, 348)


async def finish_of(http: aiohttp.ClientSession, has_begun: asyncio.Event) -> tuple[str, int, int]:
    """Stream a completion of NUM_TOKENS; return how it ended, its number of tokens and how often it was handed on."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": "how long does it take to leave",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish, num_tokens, num_resubmits = "", 0, 0
    async with http.post("/v1/completions", json=body, headers={"X-Busway-Timings": "1"}) as response:
        assert response.status == 200
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if not event.startswith(b"{"):
                continue
            has_begun.set()
            said = json.loads(event)
            assert "error" not in said, said
            for choice in said["choices"]:
                finish = choice["finish_reason"] or finish
            if said.get("usage"):
                num_tokens = said["usage"]["completion_tokens"]
            if said.get("busway"):
                num_resubmits = said["busway"]["num_resubmits"]
    return finish, num_tokens, num_resubmits
