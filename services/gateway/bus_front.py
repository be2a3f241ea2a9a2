"""The OpenAI API over NATS: `openai.{chat,completions}.{model}`, the same answers as over HTTP.

Request JSON in, with the same headers as over HTTP (X-Request-Id, traceparent, X-Busway-Timings, X-Busway-Explain); one
message out, or with stream=true one message per chunk and `[DONE]` at last; errors in OpenAI's form with
`error.status`. Answers go to the request's reply subject and nowhere else; without one nothing is done. A caller that
unsubscribes in mid-stream can't be seen (publishing to nobody raises nothing): its request runs to its own end or
deadline.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from bus.connection import Bus
from bus.serving import Call, Serving
from schemas.errors import BuswayError
from services.gateway.answering import Answering
from services.gateway.exchange import caller_from_headers
from services.gateway.models import ModelDirectory
from services.gateway.openai_errors import error_body
from services.gateway.openai_request import Endpoint

QUEUE_GROUP = "gateway"
_ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions")
_DONE = b"[DONE]"
# Of one endpoint and model at once; beyond it callers are told 429.
MAX_CALLS = 4096


class BusReply:
    """One NATS request's answer."""

    def __init__(self, call: Call) -> None:
        self.ignored_fields: tuple[str, ...] = ()
        self.is_stream = False
        self._call = call

    async def document(self, body: bytes) -> None:
        await self._call.respond(body)

    async def chunks(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            await self._call.respond(chunk)

    async def finish(self, chunks: Sequence[bytes]) -> None:
        await self.chunks(chunks)
        await self._call.respond(_DONE)

    async def fail(self, error: BuswayError, asides: Mapping[str, object]) -> None:
        await self._call.respond(error_body(error, asides, has_status=True))

    def abandon(self) -> None:
        """A publish never waits for its receiver: there is nobody to cut off."""


class BusFront:
    """Listens for every model that has live workers, also when its path is incomplete: callers then hear why."""

    def __init__(self, bus: Bus, models: ModelDirectory, answering: Answering) -> None:
        self._bus = bus
        self._models = models
        self._answering = answering
        self._servings: dict[str, list[Serving]] = {}
        self._reconciling = asyncio.Lock()
        self._is_stopped = False
        self._changed = asyncio.Event()
        models.on_change(self._changed.set)

    async def run(self) -> None:
        """Keep the subscriptions in step with the models; until cancelled."""
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def stop(self) -> None:
        """Take no new requests; those received go on."""
        self._is_stopped = True
        await self._reconcile()

    async def _reconcile(self) -> None:
        async with self._reconciling:
            wanted = set() if self._is_stopped else set(self._models.paths)
            for model in self._servings.keys() - wanted:
                for serving in self._servings.pop(model):
                    await serving.stop()
            for model in wanted - self._servings.keys():
                self._servings[model] = [await self._serve(endpoint, model) for endpoint in _ENDPOINTS]

    async def _serve(self, endpoint: Endpoint, model: str) -> Serving:
        subject = self._bus.subjects.openai(endpoint, model)
        return await self._bus.serve(
            subject,
            bytes,
            partial(self._answer, endpoint, model),
            queue=QUEUE_GROUP,
            max_concurrent_calls=MAX_CALLS,
            error_answer=partial(error_body, has_status=True),
        )

    async def _answer(self, endpoint: Endpoint, model: str, body: bytes, call: Call) -> None:
        if not call.reply:
            return
        caller = caller_from_headers({name.lower(): value for name, value in call.headers.items()}, model)

        async def read_body() -> bytes:
            return body

        await self._answering.answer(endpoint, read_body, BusReply(call), caller)
