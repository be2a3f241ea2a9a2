"""A closed-loop load of streamed chats: every prompt unique, one keep-alive connection a slot.

Times are the client's: TTFT from the request to the first event with text, ITL between events with text.
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import orjson

WORDS = tuple(
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "  # noqa: SIM905
    "which one you were her all she there would their we him been has when who will more no if out so said what".split()
)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: `isl_words` words a prompt, `osl_tokens` tokens an answer."""

    url: str
    model: str
    concurrency: int
    num_requests: int
    isl_words: int
    osl_tokens: int
    max_s: float = 10.0
    seed: int = 0


class Outcome(msgspec.Struct, kw_only=True):
    """What came back; times in seconds."""

    num_ok: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = []
    itl_s: list[float] = []
    errors: list[str] = []


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank); nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def make_body(load: Load, words: list[str]) -> dict[str, Any]:
    """Return one chat request over these words."""
    return {
        "model": load.model,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": load.osl_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield orjson.loads(line[6:])


async def chat_once(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    outcome: Outcome,
    *,
    on_first: Callable[[], None] = lambda: None,
) -> None:
    """Send one chat and add its times to `outcome`; `on_first` is called at its first text."""
    start = last = time.perf_counter()
    is_first, num_tokens = True, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            outcome.num_failed += 1
            outcome.errors.append(f"{response.status} {(await response.text())[:200]}")
            return
        async for event in events(response):
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if not any(choice["delta"].get("content") for choice in event.get("choices", ())):
                continue
            now = time.perf_counter()
            (outcome.ttft_s if is_first else outcome.itl_s).append(now - (start if is_first else last))
            if is_first:
                on_first()
            is_first, last = False, now
    outcome.num_ok += 1
    outcome.num_tokens += num_tokens


async def run_load(load: Load) -> Outcome:
    """Send the load and return its outcome."""
    rng = random.Random(load.seed or time.time_ns())
    outcome, counter = Outcome(), itertools.count()
    connector = aiohttp.TCPConnector(limit=load.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        begin = time.perf_counter()

        async def slot() -> None:
            while next(counter) < load.num_requests and time.perf_counter() - begin < load.max_s:
                words = rng.choices(WORDS, k=load.isl_words)
                await chat_once(session, load.url, make_body(load, words), outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(slot())
        outcome.wall_s = time.perf_counter() - begin
    return outcome
