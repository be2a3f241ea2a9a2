"""The kv policy on a real nats-server: what a router knows of caches, and how it comes to know it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from bus.connection import Bus
from bus.discovery import watch
from bus.serving import Call
from schemas.errors import NoRespondersError, UnavailableError
from schemas.explanation import ExplainRequest, Explanation
from schemas.hop import Abort, AcceptedHop, Ok
from schemas.ids import RequestId, new_attempt_id
from schemas.kv_events import KvChange, KvEvents, KvRemoved, KvSnapshot, KvSnapshotRequest, KvStored
from schemas.message import encode
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import LoadReport, RuntimeConfig
from services.config import RouterConfig
from services.prefix_hash import block_hashes
from services.router.service import run_router
from tests.conftest import BusFactory
from tests.router.scripted import MODEL, a_record, scripted_worker

PROMPT = tuple(range(100, 100 + 16 * 10 + 5))
NAMES = block_hashes(PROMPT, 16).tolist()


def packed(*names: int) -> bytes:
    return np.array(names, dtype="<u8").tobytes()


class TellingWorker:
    """A prefill worker's cache as told on the bus; `lose` says which messages never leave."""

    def __init__(self, bus: Bus, config: RuntimeConfig) -> None:
        self.config = config
        self.held: set[int] = set()
        self.last_id = 0
        self.num_asked = 0
        self.max_names = 1000
        self._bus = bus

    async def change(self, *changes: KvChange, is_lost: bool = False) -> None:
        first_id, self.last_id = self.last_id + 1, self.last_id + len(changes)
        for change in changes:
            if isinstance(change, KvStored):
                self.held |= set(np.frombuffer(change.blocks, dtype="<u8").tolist())
            elif isinstance(change, KvRemoved):
                self.held -= set(np.frombuffer(change.blocks, dtype="<u8").tolist())
        me = self.config
        events = KvEvents(worker_id=me.worker_id, epoch=me.epoch, first_id=first_id, changes=changes)
        if not is_lost:
            await self._bus.publish(self._bus.subjects.kv_events(me.model, me.worker_id), encode(events))

    async def store(self, *names: int, is_lost: bool = False) -> None:
        await self.change(KvStored(parent=0, blocks=packed(*names)), is_lost=is_lost)

    async def report(self) -> None:
        me = self.config
        report = LoadReport(
            worker_id=me.worker_id,
            epoch=me.epoch,
            running=0,
            waiting=0,
            kv_blocks_used=0,
            kv_blocks_cached=len(self.held),
            kv_blocks_total=100,
            last_kv_event=self.last_id,
        )
        await self._bus.publish(self._bus.subjects.load(me.model, me.worker_id), encode(report))

    async def on_snapshot(self, request: KvSnapshotRequest, call: Call) -> KvSnapshot:
        self.num_asked += 1
        num_parts = -(-len(self.held) // self.max_names) or 1
        is_enough = request.num_parts >= num_parts
        names = sorted(one for one in self.held if one % request.num_parts == request.part) if is_enough else []
        return KvSnapshot(
            worker_id=self.config.worker_id,
            epoch=self.config.epoch,
            last_id=self.last_id,
            blocks=packed(*names),
            num_parts=request.num_parts if is_enough else num_parts,
        )


class Scene:
    def __init__(self, bus: Bus, workers: dict[str, TellingWorker]) -> None:
        self.bus = bus
        self.workers = workers
        self.routers: list[str] = []

    async def cached_tokens(self, router: str, *, salt: str = "") -> dict[str, int]:
        """Return what the router believes of PROMPT, by asking it to route it."""
        request = GenerateRequest(
            request_id=RequestId("mine"),
            attempt_id=new_attempt_id(),
            model=MODEL,
            token_ids=PROMPT,
            sampling=Sampling(seed=1),
            stop=StopConditions(max_tokens=4),
            stream=StreamAddress(subject=f"{self.bus.inbox}.tok.s"),
            cache_salt=salt,
        )
        await self.bus.ask(self.bus.subjects.requests(MODEL), request, AcceptedHop)
        explanation = await self.explain(router, request.attempt_id)
        assert explanation.num_prompt_tokens == len(PROMPT)
        return {str(bid.worker): bid.cached_tokens for bid in explanation.choices[0].bids}

    async def explain(self, router: str, id: str) -> Explanation:
        async with asyncio.timeout(15):
            while True:
                subject = self.bus.subjects.router(router, "explain")
                explanation = await self.bus.ask(subject, ExplainRequest(id=id), Explanation)
                if explanation.choices:
                    return explanation
                await asyncio.sleep(0.01)

    async def until_believed(self, router: str, expected: dict[str, int]) -> None:
        async with asyncio.timeout(15):
            while (believed := await self.cached_tokens(router)) != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert believed == expected


async def wait_until_routable(here: Scene) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                await here.cached_tokens(here.routers[0])
                return
            except (NoRespondersError, UnavailableError):
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def scene(
    bus_factory: BusFactory, *names: str, ttl_s: float = 0.001, has_kv_events: bool = True
) -> AsyncIterator[Scene]:
    """A router with policy kv and these prefill workers (and a decode worker), which tell what they are told to."""
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        bus = await stack.enter_async_context(bus_factory())
        fleet = await stack.enter_async_context(watch(bus))
        here = Scene(bus, {})
        for name in names:
            config = msgspec.structs.replace(a_record(name, "prefill"), has_kv_events=has_kv_events)
            here.workers[name] = TellingWorker(bus, config)
            subject = bus.subjects.peer(name, "kv_snapshot")
            serving = await bus.serve(subject, KvSnapshotRequest, here.workers[name].on_snapshot)
            stack.push_async_callback(serving.stop)
            await stack.enter_async_context(scripted_worker(bus, config))
        await stack.enter_async_context(scripted_worker(bus, a_record("d", "decode")))
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        config = RouterConfig(policy="kv", drain_s=0.0, kv_routed_ttl_s=ttl_s)
        tasks.create_task(run_router(bus, config, stop=stop, ready=ready.set_result))
        here.routers.append((await ready).id)
        await fleet.wait_for(lambda seen: len(seen.workers) == len(names) + 1, 15.0)
        try:
            if names:
                await wait_until_routable(here)
            yield here
        finally:
            stop.set()


async def test_a_router_knows_what_workers_tell_of_their_caches(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, "a", "b") as here:
        await here.workers["b"].store(*NAMES[:6])
        await here.until_believed(here.routers[0], {"a": 0, "b": 96})
        choice = (await here.explain(here.routers[0], "mine")).choices[0]
        assert (choice.best_overlap_tokens, choice.num_candidates) == (96, 2)
        assert choice.worker == min(choice.bids, key=lambda bid: bid.score or 0.0).worker
        await here.workers["b"].change(KvRemoved(blocks=packed(NAMES[5])))
        await here.until_believed(here.routers[0], {"a": 0, "b": 80})
        assert await here.cached_tokens(here.routers[0], salt="another tenant") == {"a": 0, "b": 0}


async def test_a_router_that_comes_later_asks_for_what_it_missed(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        config = msgspec.structs.replace(a_record("early", "prefill"), has_kv_events=True)
        worker = TellingWorker(bus, config)
        worker.max_names = 4
        await worker.store(*NAMES)
        async with scene(bus_factory) as here:
            serving = await bus.serve(bus.subjects.peer("early", "kv_snapshot"), KvSnapshotRequest, worker.on_snapshot)
            async with scripted_worker(bus, config):
                await wait_until_routable(here)
                await here.until_believed(here.routers[0], {"early": 160})
            await serving.stop()
        assert worker.num_asked >= 4


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_index_with_lost_events_heals(bus_factory: BusFactory, seed: int) -> None:
    rng = random.Random(seed)
    async with scene(bus_factory, "a", "b") as here:
        for _ in range(60):
            worker = here.workers[rng.choice("ab")]
            depth = rng.randint(1, len(NAMES))
            changes: tuple[KvChange, ...] = (
                KvRemoved(blocks=packed(*NAMES)),
                KvStored(parent=0, blocks=packed(*NAMES[:depth])),
            )
            await worker.change(*changes, is_lost=rng.random() < 0.05)
        await here.workers["a"].store(*NAMES[:9], is_lost=True)
        for worker in here.workers.values():
            await worker.report()
        expected = {
            name: 16 * next((i for i, one in enumerate(NAMES) if one not in worker.held), len(NAMES))
            for name, worker in here.workers.items()
        }
        await here.until_believed(here.routers[0], expected)


async def test_what_no_router_knows_is_explained_by_nothing(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, "a") as here:
        subject = here.bus.subjects.router(here.routers[0], "explain")
        explanation = await here.bus.ask(subject, ExplainRequest(id="never seen"), Explanation)
        assert explanation == Explanation(router=here.routers[0], policy="kv")


async def test_a_prompt_on_its_way_counts_as_cached_where_it_goes(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, "a", "b", "c", ttl_s=30.0) as here:
        believed = await here.cached_tokens(here.routers[0])
        assert set(believed.values()) == {0, 160}


async def believed_of_a_prompt_given_up(here: Scene) -> set[int]:
    """Return what is believed to be cached of a prompt whose only request so far is over."""
    router = here.routers[0]
    assert set((await here.cached_tokens(router, salt="own")).values()) == {0}
    attempt_id = (await here.explain(router, "mine")).attempt_id
    abort = Abort(attempt_id=attempt_id, reason="test")
    await here.bus.ask(here.bus.subjects.router(router, "abort"), abort, Ok)
    return set((await here.cached_tokens(router, salt="own")).values())


async def test_events_tell_that_a_prompt_given_up_was_not_cached(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, "a", "b", ttl_s=30.0) as here:
        assert await believed_of_a_prompt_given_up(here) == {0}


async def test_without_events_a_routed_prefix_counts_as_cached_when_its_request_is_over(
    bus_factory: BusFactory,
) -> None:
    async with scene(bus_factory, "a", "b", ttl_s=30.0, has_kv_events=False) as here:
        assert await believed_of_a_prompt_given_up(here) == {0, 160}


async def test_without_events_a_routed_prefix_is_forgotten_after_its_time(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, "a", "b", ttl_s=0.001, has_kv_events=False) as here:
        assert await believed_of_a_prompt_given_up(here) == {0}
