"""Tells a router's totals once a second, to the gateways, whose /metrics shows them: a router serves no HTTP."""

import asyncio
import contextlib

from bus.connection import Bus
from schemas.errors import BusUnavailableError
from schemas.ids import Epoch
from schemas.message import encode
from services.router.tally import RoutingTally

PERIOD_S = 1.0


class Reporter:
    """`run` until cancelled."""

    def __init__(self, bus: Bus, tally: RoutingTally, *, router: str, epoch: Epoch) -> None:
        self._bus = bus
        self._tally = tally
        self._router = router
        self._epoch = epoch

    async def run(self) -> None:
        """Report, whether anything has changed or not: gateways come and go."""
        subject = self._bus.subjects.router_report(self._router)
        while True:
            if self._bus.is_connected:
                with contextlib.suppress(BusUnavailableError):
                    await self._bus.publish(subject, encode(self._tally.report(self._router, self._epoch)))
            await asyncio.sleep(PERIOD_S)
