"""Phases as a Prometheus histogram, of every completion that got its first token.

Noting costs an append: they are computed when somebody scrapes, or when many have gathered.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs
from prometheus_client.core import HistogramMetricFamily, Metric

from schemas.trace import PhaseSeconds
from services.gateway.histogram import LeanHistogram
from services.gateway.phases import Phases

MAX_PENDING = 1024
NAMES = PhaseSeconds.__struct_fields__


class PhaseMetrics:
    """By model and phase: both sets are bounded."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._pending: list[tuple[str, Phases]] = []
        self._by_model: dict[str, list[LeanHistogram]] = {}

    def note(self, model: str, ended: Iterable[Phases]) -> None:
        """Take a request's completions, which have ended."""
        self._pending += [(model, phases) for phases in ended if phases.first_token_at is not None]
        if len(self._pending) >= MAX_PENDING:
            self._count()

    def collect(self) -> Iterator[Metric]:
        """Return the histograms."""
        self._count()
        family = HistogramMetricFamily(
            "busway_request_phase_seconds",
            "Where the time of completions went; without decode the phases add up to the time to first token",
            labels=["model", "phase"],
        )
        for model, histograms in self._by_model.items():
            for name, histogram in zip(NAMES, histograms, strict=True):
                buckets, sum_s = histogram.buckets()
                family.add_metric([model, name.removesuffix("_s")], buckets, sum_s)
        yield family

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        for model, phases in pending:
            histograms = self._by_model.get(model)
            if histograms is None:
                histograms = self._by_model[model] = [LeanHistogram(self._bounds_s) for _ in NAMES]
            for histogram, seconds in zip(histograms, structs.astuple(phases.seconds(0.0)), strict=True):
                histogram.observe(seconds)
