"""One sim worker in a process of its own, for tests that stop or kill it: `python -m tests.flow.worker_process`.

Arguments: NATS URL, namespace, worker id, role, milliseconds a decode step.
"""

import asyncio
import sys

from bus.connection import Bus
from services.config import WorkerConfig
from services.engines.registry import make_engine
from services.worker.service import run_worker


async def main(url: str, namespace: str, name: str, role: str, step_ms: str) -> None:
    config = WorkerConfig(
        id=name,
        role=role,  # type: ignore[arg-type]
        engine="sim",
        transfer="shm",
        engine_args={"decode_ms_per_step": step_ms},
    )
    async with Bus.connect(url, name=name, client_id=name, namespace=namespace) as bus:
        await run_worker(bus, config, make_engine(config), stop=asyncio.Event(), ready=lambda record: None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
