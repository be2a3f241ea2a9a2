"""Engines of one process, linked by a PeerLink of memory: messages cross as bytes, and can be lost, doubled or held."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from schemas.errors import AckTimeoutError, BuswayError, NoRespondersError, error_from
from schemas.frames import Failed, Finished, Tokens
from schemas.handoff import BootstrapInfo, DisaggregatedParams, KvTicket
from schemas.hop import (
    DecodeRequest,
    Dispatch,
    Ok,
    PrefillDone,
    PrefillEnded,
    PrefillFailed,
    PrefillRequest,
    PrefillResult,
)
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId, new_attempt_id, new_room
from schemas.message import Message, decode, encode
from schemas.peer import (
    AgentMetadata,
    ConfirmRequest,
    Landed,
    LeaseRequest,
    MeetRequest,
    MetadataRequest,
    Stranded,
    Verdict,
    WriteRequest,
)
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from services.engines.paged.engine import PagedEngine
from services.engines.paged.handoff import HandoffOptions
from services.engines.protocol import EngineEvent, EngineProfile
from services.engines.sim.runner import SimRunner
from services.kv.shm import ShmTransfer
from services.kv.transfer import KvTransfer

A = TypeVar("A", bound=Message)

PeerMessage = (
    MetadataRequest
    | WriteRequest
    | LeaseRequest
    | ConfirmRequest
    | MeetRequest
    | Landed
    | Stranded
    | AgentMetadata
    | Verdict
    | Ok
)
Meddle = Callable[[WorkerId, Message], Awaitable[int]]
"""Returns how often a message is delivered (0: it is lost); may wait first, or raise a BuswayError."""


class LocalLink:
    """A PeerLink between the engines of a test; `sent` are the messages in order."""

    def __init__(self) -> None:
        self.engines: dict[WorkerId, PagedEngine] = {}
        self.sent: list[tuple[WorkerId, Message]] = []
        self.meddle: Meddle | None = None

    async def ask(self, worker: WorkerId, message: Message, answer: type[A], *, timeout_s: float = 1.0) -> A:
        self.sent.append((worker, message))
        engine = self.engines.get(worker)
        if engine is None:
            raise NoRespondersError(f"nobody is {worker}")
        copy = decode(encode(message), PeerMessage)
        try:
            async with asyncio.timeout(timeout_s):
                times = 1 if self.meddle is None else await self.meddle(worker, message)
                if times == 0:
                    await asyncio.Event().wait()
                for _ in range(times):
                    got = await engine.answer(copy)
        except TimeoutError:
            raise AckTimeoutError(f"no answer from {worker}") from None
        except BuswayError as error:
            raise error_from(error.record()) from None
        return decode(encode(got), answer)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for _, message in self.sent)


class Host:
    """One engine and what it emitted, by attempt."""

    def __init__(self, name: str, engine: PagedEngine, link: LocalLink, profile: EngineProfile, epoch: Epoch) -> None:
        self.worker = WorkerId(name)
        self.epoch = epoch
        self.engine = engine
        self.link = link
        self.profile = profile
        self.events: dict[AttemptId, list[EngineEvent]] = {}
        self._news = asyncio.Event()

    def emit(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self.events.setdefault(event.attempt_id, []).append(event)
        self._news.set()

    async def until(self, is_true: Callable[[], bool], within_s: float = 10.0) -> None:
        """Wait until a condition of this engine holds."""
        async with asyncio.timeout(within_s):
            while not is_true():
                self._news.clear()
                try:
                    async with asyncio.timeout(0.01):
                        await self._news.wait()
                except TimeoutError:
                    continue

    async def result(self, attempt: AttemptId) -> PrefillResult:
        kinds = PrefillDone | PrefillEnded | PrefillFailed
        await self.until(lambda: any(isinstance(event, kinds) for event in self.events.get(attempt, [])))
        results = [event for event in self.events[attempt] if isinstance(event, kinds)]
        assert len(results) == 1
        return results[0]

    async def ticket(self, attempt: AttemptId) -> KvTicket:
        result = await self.result(attempt)
        assert isinstance(result, PrefillDone), result
        assert isinstance(result.params, KvTicket)
        return result.params

    async def ended(self, attempt: AttemptId) -> Finished | Failed:
        await self.until(lambda: any(isinstance(event, Finished | Failed) for event in self.events.get(attempt, [])))
        terminals = [event for event in self.events[attempt] if isinstance(event, Finished | Failed)]
        assert len(terminals) == 1
        return terminals[0]

    async def output(self, attempt: AttemptId) -> list[int]:
        end = await self.ended(attempt)
        assert isinstance(end, Finished), end
        tokens = [event for event in self.events[attempt] if isinstance(event, Tokens)]
        ids = [token_id for event in tokens for token_id in event.token_ids]
        assert end.seq == len(ids) == end.usage.completion_tokens
        return ids

    def is_empty(self) -> bool:
        """Whether no block and no attempt is left."""
        load = self.engine.load()
        return not (load.running or load.waiting or load.num_held or load.kv_blocks_used or load.kv_blocks_quarantined)


class Pauses:
    """Holds engines that share this pause_dir at a point (services.engines.pause)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def at(self, point: str) -> Iterator[None]:
        pause = self._folder / f"{point}.pause"
        pause.touch()
        try:
            yield
        finally:
            pause.unlink()

    def hits(self, point: str) -> int:
        hits = self._folder / f"{point}.hit"
        return len(hits.read_text().splitlines()) if hits.exists() else 0


class Fleet:
    """Hosts by name; ids of requests, and legs for them."""

    def __init__(self, link: LocalLink) -> None:
        self.link = link
        self.hosts: dict[str, Host] = {}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    async def until_empty(self) -> None:
        for host in self.hosts.values():
            await host.until(host.is_empty)
            assert not host.engine.open_handoffs()

    def introduce(self) -> None:
        for host in self.hosts.values():
            for other in self.hosts.values():
                if other is not host:
                    host.engine.peer_joined(other.worker, other.epoch)


@asynccontextmanager
async def running(
    fleet: Fleet,
    name: str,
    *,
    transfer: KvTransfer | None = None,
    options: HandoffOptions | None = None,
    pause_dir: str = "",
    **engine_args: str,
) -> AsyncIterator[Host]:
    """Run a sim engine until the end of the block; raises what its run raises."""
    args = {"num_blocks": "64", "block_size": "16", "max_num_seqs": "8"} | engine_args
    runner = SimRunner(args | {"pause_dir": pause_dir})
    engine = PagedEngine(
        runner,
        transfer or ShmTransfer(),
        options=options or HandoffOptions(transfer_s=5.0),
        pauses=runner.pauses,
    )
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
    epoch = Epoch(time.time_ns())
    host: Host | None = None

    def emit(events: Sequence[EngineEvent]) -> None:
        assert host is not None
        host.emit(events)

    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(
            engine.run(worker=WorkerId(name), epoch=epoch, peers=fleet.link, emit=emit, ready=ready.set_result)
        )
        await asyncio.wait([ready, run], return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        host = Host(name, engine, fleet.link, ready.result(), epoch)
        fleet.hosts[name] = host
        fleet.link.engines[host.worker] = engine
        try:
            yield host
        finally:
            del fleet.hosts[name]
            del fleet.link.engines[host.worker]
            run.cancel()


@asynccontextmanager
async def fleet_of(*names: str, options: HandoffOptions | None = None, **engine_args: str) -> AsyncIterator[Fleet]:
    """Run several engines alike and introduce them to one another."""
    fleet = Fleet(LocalLink())
    async with AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(running(fleet, name, options=options, **engine_args))
        fleet.introduce()
        yield fleet


def request_for(token_ids: Sequence[int], *, max_tokens: int = 8, **changes: object) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId("test"),
        attempt_id=new_attempt_id(),
        model="sim",
        token_ids=tuple(token_ids),
        sampling=Sampling(seed=7, temperature=0.0),
        stop=StopConditions(max_tokens=max_tokens),
        stream=StreamAddress(subject="_INBOX.busway.test.tok.s"),
    )
    return msgspec.structs.replace(request, **changes)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(300 + (index * 7 + salt * 131) % 200 for index in range(length))


DISPATCH = Dispatch(router="test", epoch=Epoch(1), number=1)


def prefill_leg(request: GenerateRequest, bootstrap: BootstrapInfo | None = None) -> PrefillRequest:
    return PrefillRequest(request=request, dispatch=DISPATCH, result_subject="", bootstrap=bootstrap)


def decode_leg(request: GenerateRequest, params: DisaggregatedParams | None = None) -> DecodeRequest:
    return DecodeRequest(request=request, dispatch=DISPATCH, params=params)


def room_of(host: Host) -> BootstrapInfo:
    return BootstrapInfo(prefill_worker=host.worker, epoch=host.epoch, room=new_room())


async def aggregated(host: Host, request: GenerateRequest) -> list[int]:
    """Return what one engine says by itself, under an attempt of its own."""
    alone = msgspec.structs.replace(request, attempt_id=new_attempt_id())
    host.engine.decode(decode_leg(alone))
    return await host.output(alone.attempt_id)


async def pulled(prefill: Host, decode: Host, request: GenerateRequest) -> list[int]:
    """Return what two engines say together, by pull; one token may have ended it at prefill."""
    prefill.engine.prefill(prefill_leg(request))
    result = await prefill.result(request.attempt_id)
    if isinstance(result, PrefillEnded):
        return [result.token_id]
    assert isinstance(result, PrefillDone), result
    decode.engine.decode(decode_leg(request, result.params))
    return await decode.output(request.attempt_id)


async def met(prefill: Host, decode: Host, request: GenerateRequest) -> list[int]:
    """Return what two engines say together, by rendezvous."""
    room = room_of(prefill)
    decode.engine.decode(decode_leg(request, room))
    prefill.engine.prefill(prefill_leg(request, room))
    ids = await decode.output(request.attempt_id)
    assert isinstance(await prefill.result(request.attempt_id), PrefillDone)
    return ids
