"""The routers' decisions as the gateway hears of them (schemas.router_report) as Prometheus series, collected when
scraped.

Totals are each router's since its epoch began. Labels are bounded: routers and models are live ones, reasons those of
schemas.explanation. Hit rate = cached / prompt tokens; regret = missed / prompt tokens.
"""

import logging
from collections.abc import Callable, Container, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import floatToGoString

from schemas.errors import RequestError
from schemas.message import decode
from schemas.router_report import ERROR_BUCKETS_S, RouterReport, RoutingTotals

logger = logging.getLogger(__name__)

_LABELS = ("router", "model")
_COUNTERS: tuple[tuple[str, str, Callable[[RoutingTotals], float]], ...] = (
    ("busway_router_prompts", "Prompts that a worker has taken", lambda t: t.num_prompts),
    ("busway_router_prompt_tokens", "Tokens of prompts routed by policy kv", lambda t: t.num_prompt_tokens),
    (
        "busway_router_cached_tokens",
        "Of these, the tokens cached where they went, as the router knew it: prefill saved",
        lambda t: t.num_cached_tokens,
    ),
    (
        "busway_router_missed_tokens",
        "Tokens more that the candidate with the longest prefix had cached: the regret against it",
        lambda t: t.num_missed_tokens,
    ),
    (
        "busway_router_estimated_prefill_seconds",
        "Estimated seconds from dispatch to prefill's result, of prompts whose result has come",
        lambda t: t.estimated_s,
    ),
    ("busway_router_prefill_seconds", "Seconds that these took", lambda t: t.actual_s),
)
_REASONS: tuple[tuple[str, str, Callable[[RoutingTotals], dict[str, int]]], ...] = (
    ("busway_router_bypasses", "Prompts that stayed on a decode worker, by reason", lambda t: t.bypasses),
    ("busway_router_refusals", "Requests, or legs, that nobody took, by reason", lambda t: t.refusals),
)

_Row = tuple[tuple[str, str], RoutingTotals]


class RouterMetrics:
    """`live` says which routers are there."""

    def __init__(self, live: Callable[[], Container[str]]) -> None:
        self._live = live
        self._reports: dict[str, RouterReport] = {}

    def hear(self, subject: str, payload: bytes) -> None:
        """Take a message from the routers' subject; one that is no report is logged and dropped."""
        try:
            report = decode(payload, RouterReport)
        except RequestError as error:
            logger.warning("no router's report on %s: %s", subject, error.message)
            return
        known = self._reports.get(report.router)
        if known is None or report.epoch >= known.epoch:
            self._reports[report.router] = report

    def collect(self) -> Iterator[Metric]:
        """Return the series of the routers that are there now, as their last report has it."""
        live = self._live()
        self._reports = {router: report for router, report in self._reports.items() if router in live}
        rows = [
            ((report.router, totals.model), totals) for report in self._reports.values() for totals in report.totals
        ]
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, totals in rows:
                counter.add_metric(labels, read(totals))
            yield counter
        for name, text, by_reason in _REASONS:
            counter = CounterMetricFamily(name, text, labels=(*_LABELS, "reason"))
            for labels, totals in rows:
                for reason, count in by_reason(totals).items():
                    counter.add_metric((*labels, reason), count)
            yield counter
        yield _errors(rows)


def _errors(rows: list[_Row]) -> Metric:
    family = HistogramMetricFamily(
        "busway_router_estimate_error_seconds",
        "How far the estimates of prefill were from what it took, either way",
        labels=_LABELS,
    )
    bounds = [floatToGoString(bound) for bound in (*ERROR_BUCKETS_S, float("inf"))]
    for labels, totals in rows:
        if len(totals.error_counts) == len(bounds):
            buckets = list(zip(bounds, map(float, accumulate(totals.error_counts)), strict=True))
            family.add_metric(labels, buckets, totals.error_sum_s)
    return family
