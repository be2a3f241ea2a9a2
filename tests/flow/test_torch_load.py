"""Torch engines that hand KV over by NIXL, in this process, so that every task and subscription can be counted."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from bus.server import NatsServer
from services.config import HandoffMode, RoleName, WorkerConfig
from services.engines.protocol import Engine
from services.engines.registry import make_engine
from tests.conformance.tiny_model import write_tiny_llama
from tests.flow.stack import MODEL, stack, start_worker, until_ready
from tests.flow.test_load import HANDOFFS, everything_of, mixed


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / MODEL)


def torch_engine(model_path: Path, role: RoleName, handoff: HandoffMode) -> Engine:
    args = {"dtype": "float32", "threads": "1", "block_size": "16", "num_blocks": "512"}
    config = WorkerConfig(
        role=role, engine="torch", model=MODEL, model_path=str(model_path), handoff=handoff, engine_args=args
    )
    return make_engine(config, is_one_host=True)


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_24_mixed_requests_leave_no_task_block_or_subscription(
    server: NatsServer, model_path: Path, handoff: HandoffMode
) -> None:
    async with asyncio.TaskGroup() as tasks, stack(server) as here:
        start_worker(here, tasks, "p1", handoff=handoff, engine=torch_engine(model_path, "prefill", handoff))
        start_worker(here, tasks, "d1", handoff=handoff, engine=torch_engine(model_path, "decode", handoff))
        await until_ready(here)
        await here.generate([5, 6, 7], 3)
        await here.all_free()
        before = everything_of(here)
        gate = asyncio.Semaphore(8)
        async with asyncio.TaskGroup() as clients:
            asked = [clients.create_task(mixed(here, number, gate)) for number in range(24)]
        assert Counter(task.result() for task in asked) == {"left": 6, "refused": 3, "finished": 15}
        assert sum(here["p1"].load().kv_transfer_bytes.values()) + sum(here["d1"].load().kv_transfer_bytes.values()) > 0
        await here.all_free()
        assert here.client.num_in_flight == 0
        await here.until(lambda: all(now <= then for now, then in zip(everything_of(here), before, strict=True)))
