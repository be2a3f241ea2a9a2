"""Workers that do what a test tells them, on the real bus: they register, ack and publish as a worker does, and
compute nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import msgspec

from bus.connection import Bus
from bus.discovery import register
from bus.serving import Call
from schemas.errors import BuswayError
from schemas.frames import Decoding, Finished, Timings, Tokens, Usage, encode_frames
from schemas.handoff import BootstrapEndpoint, BootstrapInfo, Handoff, KvTicket
from schemas.hop import Abort, AcceptedHop, Busy, DecodeRequest, PrefillDone, PrefillRequest
from schemas.ids import Epoch, WorkerId, new_room
from schemas.message import encode
from schemas.peer import LeaseRequest, Verdict
from schemas.worker import Role, RuntimeConfig

MODEL = "m.1"
Reply = Literal["accept", "busy", "silent"] | BuswayError


class ScriptedWorker:
    """`reply` answers each leg; `legs` and `aborts` are what came. An accepted leg does nothing more by itself."""

    def __init__(self, bus: Bus, config: RuntimeConfig) -> None:
        self.config = config
        self.id = config.worker_id
        self.reply: Reply = "accept"
        self.legs: list[PrefillRequest | DecodeRequest] = []
        self.aborts: list[Abort] = []
        self.renewals: list[LeaseRequest] = []
        self.has_news = asyncio.Event()
        self._bus = bus

    async def on_leg(self, leg: PrefillRequest | DecodeRequest, call: Call) -> AcceptedHop | Busy | None:
        self.legs.append(leg)
        self.has_news.set()
        if isinstance(self.reply, BuswayError):
            raise self.reply
        if self.reply == "busy":
            return Busy(by=self.id, reason="full")
        if self.reply == "silent":
            return None
        made = None
        if isinstance(leg, PrefillRequest) and leg.bootstrap is None and self.config.handoff == "rendezvous":
            endpoint = self.config.bootstrap or BootstrapEndpoint()
            made = BootstrapInfo(prefill_worker=self.id, epoch=self.config.epoch, room=new_room(), endpoint=endpoint)
        return AcceptedHop(by=self.id, epoch=self.config.epoch, bootstrap=made)

    async def on_abort(self, abort: Abort, call: Call) -> None:
        self.aborts.append(abort)
        self.has_news.set()

    async def on_lease(self, request: LeaseRequest, call: Call) -> Verdict:
        self.renewals.append(request)
        self.has_news.set()
        return Verdict(is_good=True)

    async def wait_for(self, claim: Callable[["ScriptedWorker"], object], timeout_s: float = 5.0) -> None:
        """Return once the claim is true of this worker."""
        async with asyncio.timeout(timeout_s):
            while not claim(self):
                self.has_news.clear()
                await self.has_news.wait()

    async def prefill_leg(self, number: int = 1) -> PrefillRequest:
        """Return the number-th prefill leg that came."""
        await self.wait_for(lambda me: len(me.legs) >= number)
        leg = self.legs[number - 1]
        assert isinstance(leg, PrefillRequest)
        return leg

    async def decode_leg(self, number: int = 1) -> DecodeRequest:
        await self.wait_for(lambda me: len(me.legs) >= number)
        leg = self.legs[number - 1]
        assert isinstance(leg, DecodeRequest)
        return leg

    async def done(self, leg: PrefillRequest, *, lease_s: float = 10.0, timings: Timings | None = None) -> KvTicket:
        """Publish a prefill leg's ticket."""
        ticket = KvTicket(
            attempt_id=leg.request.attempt_id,
            prefill_worker=self.id,
            epoch=self.config.epoch,
            block_ids=(1, 2),
            num_tokens=len(leg.request.token_ids),
            layout="l",
            lease_s=lease_s,
            first_token_id=5,
        )
        await self.tell(
            leg, PrefillDone(attempt_id=leg.request.attempt_id, params=ticket, timings=timings or Timings())
        )
        return ticket

    async def tell(self, leg: PrefillRequest, result: msgspec.Struct) -> None:
        await self._bus.publish(leg.result_subject, encode(result))

    async def generate(self, leg: DecodeRequest, token_ids: tuple[int, ...] = (5, 6)) -> None:
        """Publish a decode leg's whole stream."""
        attempt = leg.request.attempt_id
        usage = Usage(prompt_tokens=len(leg.request.token_ids), completion_tokens=len(token_ids))
        frames = [
            Decoding(attempt, self.id),
            Tokens(attempt, 0, token_ids),
            Finished(attempt, len(token_ids), "length", usage),
        ]
        await self._bus.publish(leg.request.stream.subject, encode_frames(list(frames)))


def a_record(
    worker: str,
    role: Role,
    *,
    handoff: Handoff = "after_prefill",
    compat: str = "c1",
    model_digest: str = "d1",
) -> RuntimeConfig:
    return RuntimeConfig(
        worker_id=WorkerId(worker),
        epoch=Epoch(time.time_ns()),
        model=MODEL,
        model_digest=model_digest,
        role=role,
        backend="sim",
        state="ready",
        handoff=handoff,
        compat=compat,
        block_size=16,
        total_kv_blocks=100,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_context_tokens=4096,
        max_waiting=96,
        bootstrap=BootstrapEndpoint(host="prefill.test", port=8998) if handoff == "rendezvous" else None,
    )


@contextlib.asynccontextmanager
async def scripted_worker(bus: Bus, config: RuntimeConfig) -> AsyncIterator[ScriptedWorker]:
    """Be a worker of the fleet for the length of the block."""
    worker = ScriptedWorker(bus, config)
    subjects = bus.subjects
    on_leg: Callable[..., Awaitable[AcceptedHop | Busy | None]] = worker.on_leg
    servings = [
        await bus.serve(subjects.worker(worker.id, "abort"), Abort, worker.on_abort),
        await bus.serve(subjects.peer(worker.id, "lease"), LeaseRequest, worker.on_lease),
    ]
    if config.role == "prefill":
        group = subjects.prefill(config.model, config.compat)
        servings.append(await bus.serve(subjects.worker(worker.id, "prefill"), PrefillRequest, on_leg))
        servings.append(await bus.serve(group, PrefillRequest, on_leg, queue="prefill"))
    else:
        group = subjects.decode(config.model, config.compat)
        servings.append(await bus.serve(subjects.worker(worker.id, "decode"), DecodeRequest, on_leg))
        servings.append(await bus.serve(group, DecodeRequest, on_leg, queue="decode"))
    try:
        async with register(bus, config, lambda: (0, False)):
            yield worker
    finally:
        for serving in servings:
            await serving.stop()
