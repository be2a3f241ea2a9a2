"""How old the oldest contents of each worker's cache are, as far as one router can tell. Pure.

An LRU cache of C tokens holds about the last C tokens that were newly computed on it: its oldest content came when
that count was C lower. Source: this router's own dispatches, from the moment they are made; with several routers each
sees its share of all, the same for every worker.
"""

from collections import deque

from schemas.ids import WorkerId

UNFILLED = -1e12
"""Before all times: a cache that was never filled gives up nothing, and the emptier, the more it has to give."""


class _Placed:
    __slots__ = ("is_full", "prompts", "total")

    def __init__(self) -> None:
        self.prompts: deque[tuple[float, int]] = deque()
        self.total = 0
        self.is_full = False


class CacheAge:
    """Counts the tokens placed on each worker, of which the last pool's worth is in its cache."""

    def __init__(self) -> None:
        self._placed: dict[WorkerId, _Placed] = {}

    def placed(self, worker: WorkerId, num_tokens: int, capacity_tokens: int, now: float) -> None:
        """So many tokens will be newly computed on the worker."""
        placed = self._placed.setdefault(worker, _Placed())
        placed.prompts.append((now, num_tokens))
        placed.total += num_tokens
        while placed.total > capacity_tokens and len(placed.prompts) > 1:
            placed.total -= placed.prompts.popleft()[1]
            placed.is_full = True

    def oldest_at(self, worker: WorkerId) -> float:
        """Return when the oldest content came; while the cache has never been filled, UNFILLED + its tokens."""
        placed = self._placed.get(worker)
        if placed is None:
            return UNFILLED
        return placed.prompts[0][0] if placed.is_full else UNFILLED + placed.total

    def forget(self, worker: WorkerId) -> None:
        """The worker's cache is empty, or the worker gone."""
        self._placed.pop(worker, None)
