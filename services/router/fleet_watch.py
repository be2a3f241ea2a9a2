"""What the router makes of changes in the fleet: which models to listen for, whose load and requests are gone, and
why workers that look alike are not paired.
"""

import asyncio
import logging
from typing import Literal

from bus.connection import Bus
from bus.discovery import Fleet
from bus.serving import Serving
from schemas.request import GenerateRequest
from schemas.worker import Record, RuntimeConfig
from services.router.candidates import incompatibilities, short_contexts
from services.router.router import PrefillRouter

logger = logging.getLogger(__name__)

ROUTER_QUEUE = "router"


class FleetWatch:
    """Keeps a router's subscriptions and memory in step with the fleet."""

    def __init__(self, bus: Bus, fleet: Fleet, router: PrefillRouter) -> None:
        self._bus = bus
        self._fleet = fleet
        self._router = router
        self._servings: dict[str, Serving] = {}
        self._reasons: set[str] = set()
        self._is_leaving = False
        self._following = asyncio.Lock()
        self._changed = asyncio.Event()
        self._changed.set()

    def on_change(self, kind: Literal["joined", "changed", "left"], record: Record) -> None:
        """Take a change of the fleet, as bus.discovery tells it."""
        self._changed.set()
        if isinstance(record, RuntimeConfig):
            self._on_worker(kind, record)
        elif record.service == "gateway" and kind == "left":
            self._router.owner_left(record.id)

    async def run(self) -> None:
        """Listen for the requests of every model of the fleet, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._following:
                if not self._is_leaving:
                    await self._follow_models()
            self._explain()

    async def stop_taking(self) -> None:
        """Take no new requests; those received are acked."""
        self._is_leaving = True
        async with self._following:
            for serving in self._servings.values():
                await serving.stop()
                await serving.wait_idle()

    async def _follow_models(self) -> None:
        models = {record.model for record in self._fleet.all_records.values() if isinstance(record, RuntimeConfig)}
        for model in models - self._servings.keys():
            subject = self._bus.subjects.requests(model)
            self._servings[model] = await self._bus.serve(
                subject, GenerateRequest, self._router.on_request, queue=ROUTER_QUEUE
            )
        for model in self._servings.keys() - models:
            await self._servings.pop(model).stop()

    def _on_worker(self, kind: Literal["joined", "changed", "left"], config: RuntimeConfig) -> None:
        if kind == "left":
            self._router.worker_left(config.worker_id, config.epoch)

    def _explain(self) -> None:
        """Log once whatever keeps workers from being paired, or requests from workers that are too small for them."""
        workers = list(self._fleet.workers.values())
        reasons = {*incompatibilities(workers), *short_contexts(workers)}
        for reason in sorted(reasons - self._reasons):
            logger.warning(reason)
        self._reasons = reasons
