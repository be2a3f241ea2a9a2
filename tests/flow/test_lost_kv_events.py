"""One KV event message in twenty is dropped: the index ends up as what the workers themselves say that they hold."""

import asyncio
import random
from collections import defaultdict

import numpy as np
import pytest

from bus.server import NatsServer
from schemas.ids import WorkerId
from schemas.kv_events import KvSnapshot, KvSnapshotRequest
from schemas.message import decode
from schemas.worker import LoadReport
from services.router.kv_desk import KvDesk
from services.router.kv_feed import names_of
from services.router.kv_policy import KvSettings
from services.router.kv_routing import KvMemory
from services.router.kv_sync import KvSync
from services.router.prefix_index import PrefixIndex
from tests.flow.stack import Stack, stack

NUM_PROMPTS = 120
SHARE_LOST = 0.05
ARGS = {"num_blocks": "160"}  # too few for all prompts: blocks are removed all the time


class LossyRouter:
    """A router's knowledge of caches, with the real bus and workers, and a line that loses messages."""

    def __init__(self, here: Stack, seed: int) -> None:
        self.desk = KvDesk(KvSettings(), KvMemory(max_blocks=1 << 14), random.Random(seed))
        self.num_lost = 0
        self._sync = KvSync(here.bus, self.desk)
        self._rng = random.Random(seed)
        self._here = here

    @property
    def index(self) -> PrefixIndex:
        (routing,) = self.desk._routings.values()  # of the one model there is
        return routing.index

    async def listen(self) -> None:
        bus = self._here.bus
        self._here.fleet.on_change(self._sync.on_change)
        await bus.listen(bus.subjects.all_kv_events, self._on_events)
        await bus.listen(bus.subjects.all_loads, self._on_load)

    async def run(self) -> None:
        await self._sync.run()

    def _on_events(self, subject: str, payload: bytes) -> None:
        if self._rng.random() < SHARE_LOST:
            self.num_lost += 1
        else:
            self._sync.on_events(subject, payload)

    def _on_load(self, subject: str, payload: bytes) -> None:
        self.desk.on_report(decode(payload, LoadReport))
        self._sync.look()


async def held_by_workers(here: Stack) -> dict[int, set[WorkerId]]:
    """Return who holds which block, by the workers' own word."""
    holders: dict[int, set[WorkerId]] = defaultdict(set)
    for worker in here.members:
        subject = here.bus.subjects.peer(worker, "kv_snapshot")
        snapshot = await here.bus.ask(subject, KvSnapshotRequest(), KvSnapshot)
        assert snapshot.num_parts == 1
        for name in names_of(snapshot.blocks).tolist():
            holders[name].add(WorkerId(worker))
    return holders


def is_index_of(index: PrefixIndex, holders: dict[int, set[WorkerId]]) -> bool:
    return index.num_blocks == len(holders) and all(
        set(index.match(np.array([name], dtype=np.uint64))) == workers for name, workers in holders.items()
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_index_that_loses_events_ends_up_as_the_workers_own_caches(nats_server: NatsServer, seed: int) -> None:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(100, 400) for _ in range(160)] for _ in range(12)]
    async with stack(nats_server, "p0", "p1", "d0", engine_args=ARGS) as here, asyncio.TaskGroup() as tasks:
        router = LossyRouter(here, seed)
        await router.listen()
        running = tasks.create_task(router.run())
        for _ in range(NUM_PROMPTS):
            tail = [rng.randrange(100, 400) for _ in range(rng.randrange(80))]
            await here.generate([*rng.choice(beginnings), *tail], max_tokens=rng.randrange(1, 20))
        assert router.num_lost > 0
        assert router.desk.feed.num_gaps > 0
        async with asyncio.timeout(15):
            while not is_index_of(router.index, await held_by_workers(here)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.cancel()
