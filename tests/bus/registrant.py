"""A process that is in the fleet until it is ended: `python -m tests.bus.registrant URL WORKER_ID`. SIGTERM: leaves."""

import asyncio
import signal
import sys

from bus.connection import Bus
from bus.discovery import register
from tests.bus.records import worker_record


async def main(url: str, worker_id: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        Bus.connect(url, name=worker_id, client_id=worker_id) as bus,
        register(bus, worker_record(worker_id), lambda: (0, False)),
    ):
        print("registered", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
