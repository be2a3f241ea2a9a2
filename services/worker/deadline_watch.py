"""Ends attempts whose deadline has passed, in whatever phase the engine has them."""

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Iterator

from bus.deadlines import Due
from schemas.ids import AttemptId
from services.worker.ledger import Entry, Ledger

# Below this many moments, those of ended attempts aren't worth looking for.
MIN_SWEPT = 1024


class DeadlineWatch:
    """One timer over all attempts. A deadline may move back while it waits: it is looked up again when it comes.

    Attempts end long before their deadlines, so moments of ended ones are swept out once they are most of all.
    """

    def __init__(self, ledger: Ledger, on_late: Callable[[Entry, Due], None]) -> None:
        self._ledger = ledger
        self._on_late = on_late
        self._heap: list[tuple[float, AttemptId]] = []
        self._is_sooner = asyncio.Event()

    def note(self, entry: Entry) -> None:
        """Watch an attempt, from its admission and again when it enters a phase with limits of its own."""
        due = entry.due()
        if due is not None:
            if not self._heap or due.at < self._heap[0][0]:
                self._is_sooner.set()
            heapq.heappush(self._heap, (due.at, entry.attempt_id))
            if len(self._heap) > max(MIN_SWEPT, 4 * len(self._ledger)):
                self._sweep()

    def __len__(self) -> int:
        """Return how many moments are waited for."""
        return len(self._heap)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            for entry, due in self.pop(time.time()):
                self._on_late(entry, due)
            wait_s = max(0.0, self._heap[0][0] - time.time()) if self._heap else None
            self._is_sooner.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_sooner.wait()

    def pop(self, now: float) -> Iterator[tuple[Entry, Due]]:
        """Yield the attempts that are late, each once."""
        while self._heap and self._heap[0][0] <= now:
            _, attempt_id = heapq.heappop(self._heap)
            entry = self._ledger.get(attempt_id)
            due = entry.due() if entry is not None else None
            if entry is None or due is None:
                continue
            if due.at <= now:
                yield entry, due
            else:
                heapq.heappush(self._heap, (due.at, attempt_id))

    def _sweep(self) -> None:
        self._heap = [(at, attempt_id) for at, attempt_id in self._heap if self._ledger.get(attempt_id) is not None]
        heapq.heapify(self._heap)
