"""The NATS of a stack: the one the user named, or an embedded server that is started again when it dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from deploy.child import Say
from deploy.processes import IS_LINUX, start_time_of
from deploy.runtime_file import RuntimeNote, new_note
from deploy.settings import Settings
from schemas.errors import BusUnavailableError

if TYPE_CHECKING:
    from bus.server import NatsServer

LOOK_EVERY_S = 0.25


@asynccontextmanager
async def nats_for(settings: Settings, say: Say) -> AsyncIterator[RuntimeNote]:
    """Yield a note of the NATS to use while the block runs; it is the last thing to stop."""
    namespace, model = settings.nats.namespace, settings.worker.model
    if url := settings.nats.url:
        yield new_note(nats_url=url, client_url=url, namespace=namespace, model=model)
        return
    from bus.server import NatsServer

    async with NatsServer(namespace=namespace) as server, asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(_keep(server, say), name="keep nats-server")
        try:
            yield new_note(nats_url=server.internal_url, client_url=server.client_url, namespace=namespace, model=model)
        finally:
            keeper.cancel()


async def _keep(server: "NatsServer", say: Say) -> None:
    """Start the server again, on its port and store, whenever it has died; services reconnect by themselves."""
    while IS_LINUX:  # elsewhere a process's start time, and so its life, isn't known
        await asyncio.sleep(LOOK_EVERY_S)
        if start_time_of(server.pid):
            continue
        say("nats", "nats-server has died; starting it again")
        server.kill()
        while True:
            try:
                await server.start()
                break
            except BusUnavailableError as error:
                say("nats", f"{error}; next try in {LOOK_EVERY_S} s")
                await asyncio.sleep(LOOK_EVERY_S)
