"""A workload whose prompts share their beginnings, sent to a live fleet at a steady rate, and what became of each."""

import asyncio
import contextlib
import random
import time
from statistics import fmean

import msgspec
import orjson

from deploy.bench.live_fleet import MODEL, LiveFleet
from schemas.errors import ERRORS_BY_CODE, BuswayError
from schemas.frames import Accepted, Decoding, Finished, Frame, Prefilling, Tokens
from schemas.ids import RequestId, new_request_id
from schemas.request import Sampling, StopConditions

MAX_RETRIES = 30
RETRY_S = 1.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prefixes` beginnings of `prefix_tokens`, each prompt one of them and an end of its own."""

    num_prefixes: int = 16
    prefix_tokens: int = 1024
    tail_tokens: int = 40
    max_tokens: int = 8
    seed: int = 1

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return a request's prompt, always the same: the prefixes take turns in an order of chance."""
        rng = random.Random(self.seed * 1_000_003 + number)
        turns = random.Random(self.seed * 1_000_003 + number // self.num_prefixes)
        prefix = turns.sample(range(self.num_prefixes), self.num_prefixes)[number % self.num_prefixes]
        shared = random.Random(self.seed * 7919 + prefix)
        return tuple(
            3 + one.randrange(400)
            for one, count in ((shared, self.prefix_tokens), (rng, self.tail_tokens))
            for _ in range(count)
        )


class Asked(msgspec.Struct, kw_only=True):
    """One request. Times are monotonic seconds; `router` and the workers are known of requests over the bus only;
    `error` is "" for one that was answered whole. `num_retries`: how often it was told to come again, and did."""

    request_id: RequestId
    sent_at: float
    gateway: str = ""
    router: str = ""
    prefill: str = ""
    decode: str = ""
    ttft_s: float = 0.0
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    num_retries: int = 0
    may_retry: bool = False


async def ask_bus(fleet: LiveFleet, prompt: tuple[int, ...], max_tokens: int) -> Asked:
    """Send one request over the bus and wait for its end."""
    asked = Asked(request_id=new_request_id(), sent_at=time.monotonic())
    stream = fleet.client.generate(
        model=MODEL,
        token_ids=prompt,
        sampling=Sampling(seed=1, temperature=0.0),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        request_id=asked.request_id,
    )
    try:
        async with contextlib.aclosing(stream) as batches:
            async for batch in batches:
                for frame in batch:
                    _note(asked, frame)
    except BuswayError as error:
        _fail(asked, error.code)
    return asked


async def ask_http(fleet: LiveFleet, url: str, prompt: tuple[int, ...], max_tokens: int) -> Asked:
    """Send one request to a gateway and wait for its end."""
    asked = Asked(request_id=RequestId(""), sent_at=time.monotonic(), gateway=url)
    is_done = False
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with fleet.session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            _fail(asked, orjson.loads(await response.read())["error"]["code"])
            return asked
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: "):
                _note_event(asked, orjson.loads(line[6:]))
    if not is_done and not asked.error:
        asked.error = "cut_off"
    return asked


async def play(
    fleet: LiveFleet, work: Workload, *, numbers: range, rate: float, over_http: bool = False
) -> list[Asked]:
    """Send these requests at a steady rate, whether or not earlier ones have ended; return them all, in order."""
    started, urls = time.monotonic(), fleet.urls if over_http else [""]
    async with asyncio.TaskGroup() as tasks:
        sent = []
        for index, number in enumerate(numbers):
            await asyncio.sleep(started + index / rate - time.monotonic())
            sent.append(tasks.create_task(_ask(fleet, work, number, urls[index % len(urls)])))
    return [task.result() for task in sent]


async def _ask(fleet: LiveFleet, work: Workload, number: int, url: str) -> Asked:
    """Send one request, again where the answer says so, as clients do."""
    prompt, num_retries = work.prompt(number), 0
    while True:
        ask = ask_http(fleet, url, prompt, work.max_tokens) if url else ask_bus(fleet, prompt, work.max_tokens)
        asked = await ask
        asked.num_retries = num_retries
        if not asked.may_retry or num_retries == MAX_RETRIES:
            return asked
        num_retries += 1
        await asyncio.sleep(RETRY_S)


def reuse(several: list[Asked]) -> float:
    """Return the share of prompt tokens that was cached where the prompt went."""
    return sum(one.cached_tokens for one in several) / max(1, sum(one.prompt_tokens for one in several))


def mean_ttft_ms(several: list[Asked]) -> float:
    return fmean(one.ttft_s for one in several) * 1e3


def _fail(asked: Asked, code: str) -> None:
    asked.error = code
    asked.may_retry = not asked.ttft_s and ERRORS_BY_CODE[code].retryable


def _note(asked: Asked, frame: Frame) -> None:
    match frame:
        case Accepted():
            asked.router = frame.router
        case Prefilling():
            asked.prefill = frame.worker
        case Decoding():
            asked.decode = frame.worker
        case Tokens():
            asked.ttft_s = asked.ttft_s or time.monotonic() - asked.sent_at
            asked.num_tokens += len(frame.token_ids)
        case Finished():
            asked.prompt_tokens, asked.cached_tokens = frame.usage.prompt_tokens, frame.usage.cached_tokens
        case _:
            pass


def _note_event(asked: Asked, event: "dict[str, object]") -> None:
    match event:
        case {"error": {"code": str(code)}}:
            _fail(asked, code)
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(completion), **more}}:
            asked.prompt_tokens, asked.num_tokens = prompt, completion
            details = more.get("prompt_tokens_details") or {}
            asked.cached_tokens = int(details.get("cached_tokens", 0)) if isinstance(details, dict) else 0
    if event.get("choices") and not asked.ttft_s:
        asked.ttft_s = time.monotonic() - asked.sent_at
        asked.request_id = RequestId(str(event["id"]).removeprefix("cmpl-"))
