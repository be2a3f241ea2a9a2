"""Requests of a client, by HTTP through a gateway or by bus.client, and what the client saw of each."""

import asyncio
import contextlib
import time
from typing import Any, Literal

import aiohttp
import msgspec
import orjson

from bus.client import Client
from schemas.errors import ERRORS_BY_CODE, BuswayError
from schemas.frames import Accepted, Decoding, Finished, Frame, Prefilling, Tokens
from schemas.ids import new_request_id
from schemas.request import Deadlines, Sampling, StopConditions
from tests.conftest import wait_until
from tests.faults.oracle import expected_ids, expected_text

MODEL = "sim"
Via = Literal["http", "bus"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask for. `deadlines` are the bus client's only, `is_streamed` is HTTP's."""

    prompt: tuple[int, ...]
    max_tokens: int = 20
    seed: int = 7
    temperature: float = 1.0
    deadlines: Deadlines = Deadlines()
    is_streamed: bool = True
    model: str = MODEL


class Answer:
    """What a client has seen so far; `task` is its request, cancelling it is leaving.

    `stages` are the lifecycle frames in order (the bus only), `error` the code of what ended it badly. While `gate` is
    closed the client takes nothing more (the bus only).
    """

    def __init__(self, ask: Ask, via: Via) -> None:
        self.ask = ask
        self.via = via
        self.stages: list[str] = []
        self.holders: list[str] = []
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.error = ""
        self.message = ""
        self.phase = ""
        self.status = 0
        self.retry_after = ""
        self.id = ""
        self.longest_gap_s = 0.0
        self.num_resubmits = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._heard_at = 0.0
        self.task: asyncio.Task[None]

    def __repr__(self) -> str:
        said = len(self.ids) if self.via == "bus" else len(self.text.split())
        return (
            f"<{self.via} {self.stages} {self.holders} {said} tokens {self.finish_reason} {self.error} {self.message}>"
        )

    @property
    def has_begun(self) -> bool:
        """Whether the first token has come."""
        return bool(self.ids or self.text)

    @property
    def is_whole(self) -> bool:
        return self.finish_reason != "" and not self.error

    def heard(self) -> None:
        """Note that tokens came."""
        now = time.monotonic()
        if self._heard_at:
            self.longest_gap_s = max(self.longest_gap_s, now - self._heard_at)
        self._heard_at = now

    async def until(self, stage: str, timeout_s: float = 15.0) -> None:
        """Wait for a lifecycle frame."""
        await wait_until(lambda: stage in self.stages, timeout_s, lambda: f"no {stage}: {self}")

    async def begun(self, timeout_s: float = 20.0) -> None:
        """Wait for the first token."""
        await wait_until(lambda: self.has_begun, timeout_s, lambda: f"no token: {self}")

    async def over(self, timeout_s: float = 30.0) -> "Answer":
        """Wait for the end, good or bad."""
        await wait_until(self.task.done, timeout_s, lambda: f"not over: {self}")
        if not self.task.cancelled():
            self.task.result()
        return self

    async def leave(self) -> None:
        """Go away, as a client that closes its connection."""
        if self.task.done():
            return
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    def check_right_so_far(self) -> None:
        """Whatever became of it, nothing that was said is wrong."""
        ask = self.ask
        wanted = expected_ids(ask.prompt, ask.max_tokens, seed=ask.seed, temperature=ask.temperature)
        assert self.ids == wanted[: len(self.ids)], self
        text = expected_text(ask.prompt, ask.max_tokens, seed=ask.seed, temperature=ask.temperature)
        assert text.startswith(self.text), self

    def check_whole(self) -> None:
        """All of it came, right, counted once."""
        self.check_right_so_far()
        assert self.is_whole, self
        ask = self.ask
        if self.via == "bus":
            assert len(self.ids) == ask.max_tokens, self
        else:
            wanted = expected_text(ask.prompt, ask.max_tokens, seed=ask.seed, temperature=ask.temperature)
            assert self.text == wanted, self
        assert self.finish_reason == "length", self
        assert (self.num_prompt_tokens, self.num_completion_tokens) == (len(ask.prompt), ask.max_tokens), self

    def check_failed(self, *codes: str) -> None:
        """It ended with one of these errors, and the client can tell."""
        self.check_right_so_far()
        assert not self.is_whole, self
        assert self.error in codes, self

    def check_retryable(self) -> None:
        """It ended with an error that says: try again."""
        self.check_right_so_far()
        assert not self.is_whole, self
        assert ERRORS_BY_CODE[self.error].retryable, self


async def ask_bus(client: Client, answer: Answer) -> None:
    """Ask by the client library; returns at the end, good or bad."""
    ask = answer.ask
    stream = client.generate(
        model=ask.model,
        token_ids=ask.prompt,
        sampling=Sampling(seed=ask.seed, temperature=ask.temperature, is_user_seeded=True),
        stop=StopConditions(max_tokens=ask.max_tokens),
        request_id=new_request_id(),
        deadlines=ask.deadlines,
    )
    try:
        async with contextlib.aclosing(stream) as batches:
            async for batch in batches:
                for frame in batch:
                    _take(answer, frame)
                await answer.gate.wait()
    except BuswayError as error:
        answer.error, answer.message, answer.status = error.code, error.message, error.http_status
        answer.phase = error.phase or ""
        answer.retry_after = "" if error.retry_after_s is None else str(error.retry_after_s)


def _take(answer: Answer, frame: Frame) -> None:
    match frame:
        case Accepted(router=holder):
            answer.stages.append("accepted")
            answer.holders.append(holder)
        case Prefilling(worker=worker):
            answer.stages.append("prefilling")
            answer.holders.append(worker)
        case Decoding(worker=worker):
            answer.stages.append("decoding")
            answer.holders.append(worker)
        case Tokens():
            answer.ids += frame.token_ids
            answer.heard()
        case Finished():
            answer.finish_reason = frame.reason
            answer.num_prompt_tokens = frame.usage.prompt_tokens
            answer.num_completion_tokens = frame.usage.completion_tokens
            answer.num_resubmits = frame.usage.num_resubmits


async def ask_http(session: aiohttp.ClientSession, url: str, answer: Answer) -> None:
    """Ask a gateway for a stream; returns at the end, good or bad."""
    ask = answer.ask
    body = {
        "model": ask.model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "temperature": ask.temperature,
    }
    if ask.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer.status = response.status
            answer.retry_after = response.headers.get("Retry-After", "")
            if response.status != 200:
                _fail(answer, await response.read())
                return
            if ask.is_streamed:
                await _read_events(response, answer)
            else:
                _take_event(answer, orjson.loads(await response.read()))
    except aiohttp.ClientError as error:
        answer.error, answer.message = "connection_lost", repr(error)


async def _read_events(response: aiohttp.ClientResponse, answer: Answer) -> None:
    is_done = False
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif line.startswith(b"data: "):
            event = orjson.loads(line[6:])
            if "error" in event:
                _fail(answer, line[6:])
            else:
                answer.id = event["id"]
                _take_event(answer, event)
    if not is_done and not answer.error:
        answer.error = "cut_off"


def _take_event(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        answer.text += choice.get("text", "")
        answer.heard()
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := event.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_completion_tokens = usage["completion_tokens"]


def _fail(answer: Answer, body: bytes) -> None:
    error = orjson.loads(body)["error"]
    answer.error, answer.message = error["code"], error["message"]
