"""One emit for all that happened in one turn of the event loop, whoever it came from.

External engines answer each request by itself (a generator, a callback); the worker wants one call for the events of
an engine step, because it makes one message a stream subject out of each.
"""

import asyncio
from collections.abc import Sequence

from services.engines.protocol import Emit, EngineEvent


class TickEmitter:
    """Collects events in order and emits them together, in the loop's next turn. On the loop's thread only."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pending: list[EngineEvent] = []

    def add(self, events: Sequence[EngineEvent]) -> None:
        """Emit these with whatever else comes in this turn."""
        if events and not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending += events

    def flush(self) -> None:
        """Emit what is there now."""
        events, self._pending = self._pending, []
        if events:
            self._emit(events)
