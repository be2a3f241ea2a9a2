"""A worker whose pool is lost to transfers without an end leaves, one that only waits a moment stays."""

import asyncio

import msgspec
import pytest

from bus.server import NatsServer
from schemas.errors import EngineError
from services.engines.protocol import EngineLoad
from services.worker import quarantine
from services.worker.quarantine import QuarantineWatch
from tests.flow.stack import stack, start_worker, until_ready

# A piece of 16 MiB takes five seconds to end, long after the transfer was given up.
STUCK = {"num_blocks": "64", "kv_bytes_per_token": "65536", "transfer_gb_per_s": "0.0034", "kv_transfer_s": "0.1"}
LOAD = EngineLoad(
    running=0,
    waiting=0,
    num_held=0,
    kv_blocks_used=0,
    kv_blocks_cached=0,
    kv_blocks_total=100,
    kv_blocks_quarantined=0,
    queued_prefill_tokens=0,
    progress=0,
    kv_transfer_bytes={},
    num_remote_prefills=0,
    num_recomputed_tokens=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_generated_tokens=0,
)


def test_more_than_a_tenth_of_the_pool_must_be_set_aside_for_long() -> None:
    num_quarantined = 0
    watch = QuarantineWatch(
        lambda: msgspec.structs.replace(LOAD, kv_blocks_quarantined=num_quarantined), lambda error: None
    )
    num_quarantined = 10
    assert not any(watch.is_lasting(now) for now in (0.0, 100.0))
    num_quarantined = 11
    assert not any(watch.is_lasting(now) for now in (200.0, 209.9))
    num_quarantined = 10
    assert not watch.is_lasting(210.0)
    num_quarantined = 11
    assert [watch.is_lasting(now) for now in (211.0, 220.9, 221.0)] == [False, False, True]


async def test_a_worker_that_lost_its_pool_drains_and_ends_with_an_error(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "PATIENCE_S", 0.3)
    async with stack(nats_server, "p1", engine_args=STUCK) as here, asyncio.TaskGroup() as tasks:
        ends: list[BaseException] = []
        start_worker(here, tasks, "d1", engine_args=STUCK, on_death=ends.append)
        await until_ready(here)
        answer = await here.generate([5] * 16 * 20, 3)  # recomputed: what is under way still ends well
        assert answer.finished.usage.num_computed_prompt_tokens == 320
        await here.until(lambda: ends, timeout_s=10.0)
        assert isinstance(ends[0], EngineError)
        assert "20 of 64 KV blocks" in str(ends[0])
        del here.members["d1"]
