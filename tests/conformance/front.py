"""One router and one gateway in front of a fleet of worker processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from bus.connection import Bus
from bus.server import NatsServer
from services.config import GatewayConfig, RouterConfig
from services.gateway.service import run_gateway
from services.router.service import run_router


@contextlib.asynccontextmanager
async def front(server: NatsServer, namespace: str) -> AsyncIterator[str]:
    """Run them until the end of the block; yields the gateway's URL."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with contextlib.AsyncExitStack() as stack:
        router_bus, gateway_bus = [
            await stack.enter_async_context(
                Bus.connect(server.internal_url, name=name, client_id=f"{namespace}-{name}", namespace=namespace)
            )
            for name in ("router", "gateway")
        ]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        tasks.create_task(run_router(router_bus, RouterConfig(id="r"), stop=stop, ready=lambda record: None))
        gateway = GatewayConfig(port=0, id="g", drain_s=2.0)
        tasks.create_task(run_gateway(gateway_bus, gateway, stop=stop, ready=url.set_result))
        yield await url


async def until_ready(http: aiohttp.ClientSession) -> None:
    """Return when the gateway says that each model can be served."""
    async with asyncio.timeout(20):
        while (await http.get("/ready")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
