"""The gateway's own metrics, in a registry of its own (never prometheus_client's global one)."""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import floatToGoString

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
UNKNOWN_MODEL = "unknown"


class GapHistogram:
    """Gaps between tokens. Our own because it is observed for every token: a bisection into a list costs a tenth of
    prometheus_client's locked buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAP_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(_GAP_BUCKETS_S, gap_s)] += 1
        self._sum_s += gap_s

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets and the sum."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*_GAP_BUCKETS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        return buckets, self._sum_s


class _GapCollector:
    def __init__(self) -> None:
        self.by_model: dict[str, GapHistogram] = {}

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "busway_gateway_inter_token_seconds", "Gap between tokens as they reach the gateway", labels=["model"]
        )
        for model, histogram in self.by_model.items():
            buckets, sum_s = histogram.buckets()
            family.add_metric([model], buckets, sum_s)
        yield family


class GatewayMetrics:
    """`model` is always a served model's name or UNKNOWN_MODEL: clients can't grow the set of series."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gaps = _GapCollector()
        self.registry.register(self._gaps)
        self._requests = Counter(
            "busway_gateway_requests",
            "Requests ended, by outcome: ok, aborted, or the error's code",
            ["model", "endpoint", "outcome"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "busway_gateway_requests_in_flight", "Requests being answered", ["endpoint"], registry=self.registry
        )
        self._resumes = Counter(
            "busway_resumes",
            "Requests sent anew with the ids delivered so far, by the code of the error that cost the attempt before",
            ["reason"],
            registry=self.registry,
        )
        self._resends = Counter("busway_resends", "Times a holder was asked to send again", registry=self.registry)
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request's arrival to the first token")
        self._duration = self._histogram("request_seconds", "From the request's arrival to its end")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts accepted")
        self._completion_tokens = self._counter("completion_tokens", "Tokens of completions received")

    def gaps(self, model: str) -> GapHistogram:
        """Return the histogram of a model's inter-token gaps."""
        return self._gaps.by_model.setdefault(model, GapHistogram())

    def resumed(self, reason: str) -> None:
        self._resumes.labels(reason).inc()

    def resent(self, holder: str) -> None:
        self._resends.inc()

    def begin(self, endpoint: str) -> None:
        self._in_flight.labels(endpoint).inc()

    def end(self, endpoint: str, model: str, outcome: str, *, seconds: float, ttft_s: float | None) -> None:
        self.num_ended += 1
        self._in_flight.labels(endpoint).dec()
        self._requests.labels(model, endpoint, outcome).inc()
        if model != UNKNOWN_MODEL:
            self._duration.labels(model).observe(seconds)
        if ttft_s is not None:
            self._ttft.labels(model).observe(ttft_s)

    def count_tokens(self, model: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        self._completion_tokens.labels(model).inc(completion_tokens)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"busway_gateway_{name}", text, ["model"], registry=self.registry, buckets=_LATENCY_BUCKETS_S)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"busway_gateway_{name}", text, ["model"], registry=self.registry)
