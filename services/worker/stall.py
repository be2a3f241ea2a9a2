"""Noticing that this process was stopped and woken up: others took it for dead meanwhile, so what it holds is void."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 2.0
TICK_S = 0.25


def boot_time_s() -> float:
    """Return seconds since boot, those spent suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StallWatch:
    """`check` comes before anything else at every entrance; `run` keeps the last time fresh.

    `on_stall` gets the seconds that were missed.
    """

    def __init__(self, on_stall: Callable[[float], None], clock: Callable[[], float] = boot_time_s) -> None:
        self._on_stall = on_stall
        self._clock = clock
        self._last = clock()

    def check(self) -> None:
        """Call `on_stall` when more than 2 s have passed since anyone looked."""
        now = self._clock()
        missed, self._last = now - self._last, now
        if missed > LIMIT_S:
            self._on_stall(missed)

    async def run(self) -> None:
        """Look often enough, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(TICK_S)
