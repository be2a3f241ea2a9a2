"""The router's subscriptions follow the fleet, and end with its leaving, whatever comes meanwhile."""

import asyncio
import secrets

from bus.connection import Bus
from bus.discovery import register, watch
from bus.server import NatsServer
from schemas.ids import Epoch
from schemas.worker import ServiceRecord
from services.config import RouterConfig
from services.router.fleet_watch import FleetWatch
from services.router.router import PrefillRouter
from tests.router.conftest import MakeConfig


async def test_a_model_that_appears_while_the_router_leaves_is_not_listened_for(
    nats_server: NatsServer, make_config: MakeConfig
) -> None:
    namespace = f"t{secrets.token_hex(6)}"
    async with (
        Bus.connect(nats_server.internal_url, name="r", client_id="r", namespace=namespace) as bus,
        watch(bus) as fleet,
    ):
        record = ServiceRecord(service="router", id="r", epoch=Epoch(1), state="ready")
        fleet_watch = FleetWatch(bus, fleet, PrefillRouter(bus, RouterConfig(), fleet, record))
        async with register(bus, make_config("w", "both"), lambda: (0, False)), asyncio.TaskGroup() as tasks:
            await fleet.wait_for(lambda now: "w" in now.workers, 5.0)
            run = tasks.create_task(fleet_watch.run())
            await asyncio.sleep(0)  # it has begun to subscribe
            await fleet_watch.stop_taking()
            run.cancel()
        requests = bus.subjects.requests("m")
        assert [serving.subject for serving in bus.servings if serving.subject == requests] == []
