"""From a command to an answer: `busway serve` to the first answer, and one more worker to its first token served."""

import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

import aiohttp
import orjson

from deploy.bench.load import Load, Outcome, chat_once, make_body
from deploy.bench.stack import busway_stack

MODEL = "smollm2-135m-instruct"


async def ask(url: str, model: str) -> None:
    """Ask for two tokens; raises RuntimeError when the answer isn't one."""
    load = Load(url=url, model=model, concurrency=1, num_requests=1, isl_words=8, osl_tokens=2)
    outcome = Outcome()
    async with aiohttp.ClientSession() as session:
        await chat_once(session, url, make_body(load, ["hello"] * 8), outcome)
    if outcome.num_ok != 1:
        raise RuntimeError(f"no answer: {outcome.errors}")


def time_serve(*flags: str, model: str) -> float:
    """Return the seconds from `busway serve` to the end of its first answer."""
    start = time.perf_counter()
    with busway_stack(*flags, model=model) as stack:
        asyncio.run(ask(stack.url, model))
        return time.perf_counter() - start


def worker_ids() -> set[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "status", "--json"], capture_output=True, check=True
    ).stdout
    return {worker["worker_id"] for worker in orjson.loads(listed)["workers"] if worker["state"] == "ready"}


async def ask_until_served_by(url: str, model: str, worker: str, *, limit_s: float) -> None:
    """Ask until an answer names the worker as its decoder."""
    load = Load(url=url, model=model, concurrency=1, num_requests=1, isl_words=8, osl_tokens=2)
    body = make_body(load, ["hello"] * 8) | {"stream": False, "stream_options": None}
    end = time.perf_counter() + limit_s
    async with aiohttp.ClientSession(headers={"x-busway-timings": "1"}) as session:
        while time.perf_counter() < end:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status == 200 and worker.encode() in await response.read():
                    return
    raise RuntimeError(f"{worker} served nothing within {limit_s} s")


def time_join(flags: tuple[str, ...], worker_flags: tuple[str, ...], model: str) -> float:
    """Return the seconds from `busway worker` to the end of the first answer it decoded."""
    name = "bench-joiner"
    with busway_stack("--policy", "round_robin", *flags, model=model) as stack:
        asyncio.run(ask(stack.url, model))
        start = time.perf_counter()
        command = [sys.executable, "-m", "deploy.cli", "worker", "--role", "decode", "--id", name, *worker_flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(ask_until_served_by(stack.url, model, name, limit_s=120))
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait(timeout=30)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return medians in seconds, and the share of a bare interpreter start in them (the floor)."""
    rounds = 1 if quick else 3
    sim, torch = ("--engine", "sim"), ("--engine", "torch", "--model", MODEL)

    def floor() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import asyncio"], check=True)
        return time.perf_counter() - start

    def median(times: list[float]) -> float:
        return statistics.median(times)

    return {
        "bare_python_s": median([floor() for _ in range(rounds)]),
        "serve_sim_s": median([time_serve(*sim, model="sim") for _ in range(rounds)]),
        "serve_torch_s": median([time_serve(*torch, model=MODEL) for _ in range(rounds)]),
        "join_sim_s": median([time_join(sim, sim, "sim") for _ in range(rounds)]),
        "join_torch_s": median([time_join(torch, torch, MODEL) for _ in range(rounds)]),
    }
