"""A histogram of our own: bisecting into a list costs a tenth of prometheus_client's locked buckets, and some of ours
are observed for every token."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.openmetrics.exposition import floatToGoString


class LeanHistogram:
    """Seconds in buckets up to each of `bounds_s`, and one for what is beyond. For one thread."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets and the sum."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds_s, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        return buckets, self._sum_s
