"""The gateway's own metrics, in a registry of its own (never prometheus_client's global one)."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric

from services.gateway.histogram import LeanHistogram
from services.gateway.phase_metrics import PhaseMetrics
from services.gateway.phases import Phases

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, *_LATENCY_BUCKETS_S)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
UNKNOWN_MODEL = "unknown"


class _GapCollector:
    def __init__(self) -> None:
        self.by_model: dict[str, LeanHistogram] = {}

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
        self._phases = PhaseMetrics(_PHASE_BUCKETS_S)
        self.registry.register(self._phases)
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

    def gaps(self, model: str) -> LeanHistogram:
        """Return the histogram of a model's inter-token gaps."""
        return self._gaps.by_model.setdefault(model, LeanHistogram(_GAP_BUCKETS_S))

    def phases(self, model: str, phases: Iterable[Phases]) -> None:
        """Count an ended request's completions."""
        self._phases.note(model, phases)

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
