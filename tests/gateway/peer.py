"""The other side of the gateway for tests: router and workers in one, on a bare NATS connection, by script.

It speaks the wire's JSON by hand (nothing of bus/ or schemas/ encodes it), so that the gateway is tested against the
format and not against itself.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import nats
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

ROUTER = "test-router"
PREFILL = "test-prefill"
DECODE = "test-decode"

JsonObject = dict[str, Any]


@dataclass
class Attempt:
    """One request that came, and the pen for its answer. `is_aborted` is set when an abort of it arrives."""

    nats: NatsClient
    request: JsonObject
    is_aborted: asyncio.Event = field(default_factory=asyncio.Event)
    aborted_at: float | None = None
    num_sent: int = 0

    @property
    def id(self) -> str:
        return str(self.request["attempt_id"])

    @property
    def max_tokens(self) -> int:
        return int(self.request["stop"]["max_tokens"])

    async def frames(self, *frames: list[Any]) -> None:
        """Publish frames as one step's message."""
        await self.nats.publish(self.request["stream"]["subject"], json.dumps(frames).encode())

    async def begin(self) -> None:
        await self.frames(["a", self.id, ROUTER])
        await self.frames(["p", self.id, PREFILL])
        await self.frames(["d", self.id, DECODE])

    def tokens_frame(self, ids: list[int], logprobs: list[Any] | None = None) -> list[Any]:
        frame = ["t", self.id, self.num_sent, ids, logprobs]
        self.num_sent += len(ids)
        return frame

    def finished_frame(self, reason: str, cached_tokens: int = 0) -> list[Any]:
        usage = {
            "prompt_tokens": len(self.request["token_ids"]),
            "completion_tokens": self.num_sent,
            "cached_tokens": cached_tokens,
        }
        timings = {"prefill_queue_s": 0.001, "prefill_s": 0.002, "transfer_s": 0.003, "kv_bytes": 4096}
        return ["f", self.id, self.num_sent, reason, usage, timings]

    def failed_frame(self, code: str, message: str, **fields: Any) -> list[Any]:
        error = {"type": "error.v1", "code": code, "message": message, **fields}
        return ["e", self.id, self.num_sent, error]


Script = Callable[[Attempt], Awaitable[None]]


@dataclass
class Peer:
    """Answers `requests.{model}`: acks, then plays `script`. `refusal` answers instead of the ack."""

    nats: NatsClient
    script: Script
    refusal: JsonObject | None = None
    attempts: list[Attempt] = field(default_factory=list)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def on_request(self, msg: Msg) -> None:
        if self.refusal is not None:
            await self.nats.publish(msg.reply, json.dumps(self.refusal).encode())
            return
        attempt = Attempt(self.nats, json.loads(msg.data))
        self.attempts.append(attempt)
        ack = {"type": "accepted.v1", "by": ROUTER, "epoch": 1}
        await self.nats.publish(msg.reply, json.dumps(ack).encode())
        task = asyncio.get_running_loop().create_task(self._play(attempt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def on_abort(self, msg: Msg) -> None:
        attempt_id = json.loads(msg.data)["attempt_id"]
        for attempt in self.attempts:
            if attempt.id == attempt_id:
                attempt.aborted_at = monotonic()
                attempt.is_aborted.set()

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    async def _play(self, attempt: Attempt) -> None:
        """Play the script until it ends or the attempt is aborted."""
        script = asyncio.ensure_future(self.script(attempt))  # noqa: TID251
        aborted = asyncio.ensure_future(attempt.is_aborted.wait())  # noqa: TID251
        try:
            await asyncio.wait({script, aborted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            script.cancel()
            aborted.cancel()
        if script.done() and not script.cancelled():
            script.result()


async def open_peer(url: str, namespace: str, model_slug: str, script: Script) -> Peer:
    """Connect a peer and listen for one model; close `peer.nats` when done."""
    client = await nats.connect(url)
    peer = Peer(client, script)
    await client.subscribe(f"{namespace}.v1.requests.{model_slug}", "router", cb=peer.on_request)
    await client.subscribe(f"{namespace}.v1.router.{ROUTER}.abort", cb=peer.on_abort)
    for worker in (PREFILL, DECODE):
        await client.subscribe(f"{namespace}.v1.worker.{worker}.abort", cb=peer.on_abort)
    await client.flush()
    return peer


def say(ids: list[int], *, end_id: int | None = None, logprobs: Callable[[int], Any] | None = None) -> Script:
    """Return a script that sends these ids one a step, up to max_tokens, and `end_id` (EOS) at last."""

    async def script(attempt: Attempt) -> None:
        await attempt.begin()
        wanted = [*ids, end_id] if end_id is not None else ids
        sent = wanted[: attempt.max_tokens]
        has_logprobs = logprobs is not None and "num_logprobs" in attempt.request
        for token_id in sent:
            scores = [logprobs(token_id)] if has_logprobs and logprobs else None
            await attempt.frames(attempt.tokens_frame([token_id], scores))
        is_ended = end_id is not None and len(sent) == len(wanted)
        await attempt.frames(attempt.finished_frame("stop" if is_ended else "length"))

    return script
