"""What is to happen when, in virtual seconds."""

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count

Action = Callable[[float], None]


class Turn(IntEnum):
    """Who goes first at one instant: begins come after ends, so that prompts that come together share a pass."""

    ARRIVAL = 0
    PASS_END = 1
    ACTIVATION = 2
    PASS_BEGIN = 3
    REPORT = 4


class Agenda:
    """Actions in order of time, then turn, then of being entered; each is told the time it was entered for."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, Action]] = []
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def at(self, when: float, turn: Turn, action: Action) -> None:
        """Enter an action."""
        heapq.heappush(self._entries, (when, turn, next(self._order), action))

    def step(self) -> None:
        """Carry out the next action; there must be one."""
        now, _, _, action = heapq.heappop(self._entries)
        action(now)
