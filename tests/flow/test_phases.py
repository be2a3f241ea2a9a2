"""Where a request's time went: the phases add up to what the client measured, and each grows with what delays it."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import msgspec
import orjson
import pytest

from bus.server import NatsServer
from deploy.tracing import find_trace
from schemas.trace import CompletionTrace, PhaseSeconds, Trace
from services.config import GatewayConfig, HandoffMode
from services.gateway.service import run_gateway
from tests.faults.stack import promptly
from tests.flow.stack import Stack, connect, stack

HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]
PAIR = ("p1", "d1")
# 60 tokens: 120 ms of prefill, 60 x 16 KiB at 10 MB/s: about 100 ms of transfer, 20 ms a token.
SLOW = {
    "prefill_ms_per_token": "2",
    "kv_bytes_per_token": "16384",
    "transfer_gb_per_s": "0.01",
    "decode_ms_per_step": "20",
}
PROMPT_TOKENS = 60
CLIENT_ERROR_S = 0.06
"""Client and gateway share a loop with everything else: what they measure differs by a few turns of it."""
HELD_S = 0.3
"""Long beside everything else, where other processes leave us the cores (`promptly`)."""


class Seen(NamedTuple):
    """What a client measured of a stream, in seconds, and the answer's id."""

    ttft_s: float
    total_s: float
    id: str
    headers: dict[str, str]


class Asker:
    """A client of a gateway in front of a stack."""

    def __init__(self, here: Stack, url: str, http: aiohttp.ClientSession) -> None:
        self.here = here
        self.url = url
        self.http = http
        self._number = 0

    def body(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        self._number += 1
        prompt = [3 + (self._number * 7919 + index * 31) % 400 for index in range(PROMPT_TOKENS)]
        return {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "stream": True, **fields}

    async def ask(self, max_tokens: int = 6, **headers: str) -> Seen:
        began = perf_counter()
        first_at, last_id = 0.0, ""
        async with self.http.post(
            f"{self.url}/v1/completions", json=self.body(max_tokens), headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first_at = first_at or perf_counter()
                    last_id = orjson.loads(line[6:])["id"]
            return Seen(first_at - began, perf_counter() - began, last_id, dict(response.headers))

    async def trace(self, id: str) -> Trace:
        found, _ = await find_trace(self.here.bus, id)
        assert found is not None, id
        return found

    async def trace_that(self, id: str, is_right: Callable[[Trace], bool]) -> Trace:
        """Return a trace once it is right: what the gateway hears comes a moment after it has happened."""
        async with asyncio.timeout(promptly(5.0)):
            while not is_right(trace := await self.trace(id)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return trace

    async def traced(self, max_tokens: int = 6) -> tuple[Seen, CompletionTrace]:
        """Ask, and return what the client saw and what the gateway says of it, which must agree."""
        seen = await self.ask(max_tokens)
        (completion,) = (await self.trace(seen.id)).completions
        check_adds_up(completion)
        assert completion.ttft_s is not None
        assert 0 < seen.ttft_s - completion.ttft_s < promptly(CLIENT_ERROR_S)
        assert 0 < seen.total_s - completion.total_s < promptly(CLIENT_ERROR_S)
        return seen, completion


def check_adds_up(completion: CompletionTrace) -> None:
    seconds = msgspec.structs.asdict(completion.phases)
    assert min(seconds.values()) >= 0, seconds
    assert sum(seconds.values()) == pytest.approx(completion.total_s)
    if completion.ttft_s is not None:
        assert sum(seconds.values()) - seconds["decode_s"] == pytest.approx(completion.ttft_s)
        assert seconds["unreported_s"] == 0


@contextlib.asynccontextmanager
async def asker(here: Stack) -> AsyncIterator[Asker]:
    """Run a gateway in front of a stack and be its client."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with (
        connect(here.server, "gateway", here.namespace) as bus,
        asyncio.TaskGroup() as tasks,
        aiohttp.ClientSession() as http,
    ):
        tasks.create_task(run_gateway(bus, GatewayConfig(port=0, id="g1"), stop=stop, ready=url.set_result))
        here_asks = Asker(here, await url, http)
        try:
            async with asyncio.timeout(5.0):
                while (await http.get(f"{here_asks.url}/ready")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await here.fleet.wait_for(lambda fleet: "g1" in fleet.gateways, 5.0)
            await here_asks.ask(2)
            yield here_asks
        finally:
            stop.set()


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_the_phases_of_a_pair_add_up_to_what_the_client_measured(
    server: NatsServer, handoff: HandoffMode
) -> None:
    async with stack(server, *PAIR, handoff=handoff, engine_args=SLOW) as here, asker(here) as client:
        _, completion = await client.traced()
        phases = completion.phases
        assert phases.prefill_s > 0.06
        assert phases.transfer_s > 0.05
        assert phases.decode_s > 0.05
        assert min(phases.gateway_s, phases.queue_s, phases.route_s, phases.first_token_s) > 0
        assert completion.kv_bytes == 64 * 16384
        (attempt,) = completion.attempts
        assert (attempt.router, attempt.prefill_worker, attempt.decode_worker) == ("r0", "p1", "d1")


async def test_the_phases_of_an_aggregated_request_have_no_transfer(server: NatsServer) -> None:
    async with stack(server, "b1", engine_args=SLOW) as here, asker(here) as client:
        _, completion = await client.traced()
        phases = completion.phases
        assert phases.prefill_s > 0.12
        assert (phases.transfer_s, phases.decode_queue_s) == (0, 0)
        assert completion.attempts[0].prefill_worker == ""


async def test_transfer_that_runs_while_the_prompt_is_computed_costs_nothing(server: NatsServer) -> None:
    """Four chunks: all but the last one's KV moves meanwhile, and isn't counted twice."""
    args = SLOW | {"max_batched_tokens": "16"}
    async with stack(server, *PAIR, handoff="rendezvous", engine_args=args) as here, asker(here) as client:
        _, completion = await client.traced()
        assert completion.overlap_s > 0.02
        assert completion.phases.transfer_s > 0
        assert completion.phases.prefill_s > 0.06


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_waiting_for_a_full_prefill_worker_is_prefill_queue(
    server: NatsServer, handoff: HandoffMode, tmp_path: Path
) -> None:
    args = {"max_num_seqs": "1", "pause_dir": str(tmp_path)}
    async with stack(server, *PAIR, handoff=handoff, engine_args=args) as here, asker(here) as client:
        async with asyncio.TaskGroup() as tasks:
            with held(tmp_path, "before_prefill"):
                occupant = tasks.create_task(client.traced(1))
                await here.until((tmp_path / "before_prefill.hit").exists)
                other = tasks.create_task(client.traced(1))
                await here.until(lambda: here["p1"].load().waiting == 1)
                await asyncio.sleep(promptly(HELD_S))
        assert occupant.result()[1].phases.prefill_s > 0.9 * HELD_S
        assert other.result()[1].phases.prefill_queue_s > 0.9 * HELD_S
        assert largest(other.result()[1].phases) == "prefill_queue_s"


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_waiting_for_a_full_decode_worker_is_decode_queue(
    server: NatsServer, handoff: HandoffMode, tmp_path: Path
) -> None:
    """The occupant stands at its second token; the other's KV is ready long before there is room for it."""
    args = SLOW | {"max_num_seqs": "1", "pause_dir": str(tmp_path)}
    async with stack(server, *PAIR, handoff=handoff, engine_args=args) as here, asker(here) as client:
        async with asyncio.TaskGroup() as tasks:
            with held(tmp_path, "after_first_token"):
                occupant = tasks.create_task(client.traced(3))
                await here.until((tmp_path / "after_first_token.hit").exists)
                other = tasks.create_task(client.traced(2))
                await here.until(lambda: here["d1"].load().waiting == 1)
                await here.until(lambda: here["p1"].load().queued_prefill_tokens == 0)
                await asyncio.sleep(promptly(HELD_S))
        assert largest(occupant.result()[1].phases) == "decode_s"
        assert other.result()[1].phases.decode_queue_s > 0.9 * HELD_S
        assert largest(other.result()[1].phases) == "decode_queue_s"


PHASE_OF = {
    "before_prefill": "prefill_s",
    "before_ticket": "prefill_s",
    "mid_transfer": "transfer_s",
    "before_confirm": "transfer_s",
    "after_first_token": "decode_s",
}


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_what_is_held_up_shows_in_its_phase(server: NatsServer, handoff: HandoffMode, tmp_path: Path) -> None:
    args = {"pause_dir": str(tmp_path)}
    async with stack(server, *PAIR, handoff=handoff, engine_args=args) as here, asker(here) as client:
        for point, phase in PHASE_OF.items():
            if handoff == "rendezvous" and point in ("before_ticket", "before_confirm"):
                continue  # it has neither
            async with asyncio.TaskGroup() as tasks:
                with held(tmp_path, point):
                    asked = tasks.create_task(client.traced())
                    await here.until((tmp_path / f"{point}.hit").exists)
                    await asyncio.sleep(promptly(HELD_S))
            phases = asked.result()[1].phases
            assert msgspec.structs.asdict(phases)[phase] > 0.9 * HELD_S, point
            assert largest(phases) == phase, point


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_client_that_left_is_shown_as_far_as_it_got(
    server: NatsServer, handoff: HandoffMode, tmp_path: Path
) -> None:
    args = {"pause_dir": str(tmp_path)}
    async with stack(server, *PAIR, handoff=handoff, engine_args=args) as here, asker(here) as client:
        with held(tmp_path, "before_prefill"):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(client.ask(**{"X-Request-Id": "leaver"}))
                await here.until((tmp_path / "before_prefill.hit").exists)
                running = await client.trace_that("leaver", lambda trace: _reached(trace) in ("prefilling", "decoding"))
                assert running.outcome == "running"
                asked.cancel()
            trace = await client.trace_that("leaver", lambda trace: trace.outcome != "running")
        await here.all_free()
        assert trace.outcome == "aborted"
        (completion,) = trace.completions
        check_adds_up(completion)
        assert completion.ttft_s is None
        assert completion.phases.unreported_s > 0
        assert trace.request_id != "leaver"
        assert (await client.trace(completion.attempts[0].attempt_id)).request_id == trace.request_id


async def test_a_request_that_is_refused_says_why(server: NatsServer) -> None:
    async with stack(server, *PAIR) as here, asker(here) as client:
        for headers, fields, code in (
            ({"X-Request-Id": "too long"}, {"max_tokens": 10**6}, "context_length_exceeded"),
            ({"X-Request-Id": "no model"}, {"model": "other"}, "model_not_found"),
        ):
            body = client.body(1) | fields
            async with client.http.post(f"{client.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status in (400, 404)
                assert response.headers["X-Request-Id"] == headers["X-Request-Id"]
            trace = await client.trace(headers["X-Request-Id"])
            assert (trace.outcome, trace.completions) == (code, ())
            assert trace.error
            assert 0 < trace.total_s < 5


async def test_every_choice_has_its_phases_and_the_whole_its_names(server: NatsServer) -> None:
    caused_by = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with stack(server, *PAIR) as here, asker(here) as client:
        headers = {"traceparent": caused_by, "X-Busway-Timings": "1"}
        body = client.body(3) | {"n": 3, "stream": False}
        async with client.http.post(f"{client.url}/v1/completions", json=body, headers=headers) as response:
            answer = orjson.loads(await response.read())
            assert response.headers["traceparent"].startswith(caused_by[:36])
            assert response.headers["traceparent"] != caused_by
        trace = await client.trace(answer["id"])
        assert (trace.trace_id, trace.parent_id) == (caused_by[3:35], caused_by[36:52])
        assert [one.index for one in trace.completions] == [0, 1, 2]
        for completion in trace.completions:
            check_adds_up(completion)
            assert completion.num_tokens == 3
        told = answer["busway"]
        assert (told["request_id"], told["trace_id"]) == (trace.request_id, trace.trace_id)
        assert told["total_s"] == pytest.approx(trace.completions[0].total_s, abs=1e-4)
        for name in (trace.trace_id, trace.request_id, f"cmpl-{trace.request_id}"):
            assert (await client.trace(name)).request_id == trace.request_id


async def test_an_id_that_no_gateway_knows_is_found_nowhere(server: NatsServer) -> None:
    async with stack(server, *PAIR) as here, asker(here):
        assert await find_trace(here.bus, "unheard-of") == (None, 1)


async def test_the_phases_are_metrics_and_add_up_there_too(server: NatsServer) -> None:
    async with stack(server, *PAIR, engine_args=SLOW) as here, asker(here) as client:
        for _ in range(3):
            await client.ask()
        text = await (await client.http.get(f"{client.url}/metrics")).text()
        counts, sums = series(text, "count"), series(text, "sum")
        wanted = {name.removesuffix("_s") for name in PhaseSeconds.__struct_fields__}
        assert counts == dict.fromkeys(wanted, 4.0)
        ttft = re.search(r"^busway_gateway_time_to_first_token_seconds_sum\S* (\S+)$", text, re.MULTILINE)
        assert ttft is not None
        assert sum(sums.values()) - sums["decode"] == pytest.approx(float(ttft[1]))
        assert sums["prefill"] > 0.18


def largest(phases: PhaseSeconds) -> str:
    """Return the name of the longest phase."""
    seconds = msgspec.structs.asdict(phases)
    return max(seconds, key=lambda name: seconds[name])


def _reached(trace: Trace) -> str:
    return trace.completions[0].attempts[0].reached if trace.completions else ""


@contextlib.contextmanager
def held(folder: Path, point: str) -> Iterator[None]:
    """Hold whatever comes to a pause point for the length of the block."""
    (folder / f"{point}.hit").unlink(missing_ok=True)
    (folder / f"{point}.pause").touch()
    try:
        yield
    finally:
        (folder / f"{point}.pause").unlink()


def series(text: str, suffix: str) -> dict[str, float]:
    """Return a sample of the phase histogram for each phase."""
    pattern = rf'^busway_request_phase_seconds_{suffix}{{model="sim",phase="(\w+)"}} (\S+)$'
    return {phase: float(value) for phase, value in re.findall(pattern, text, re.MULTILINE)}
