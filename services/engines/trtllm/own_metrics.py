"""TensorRT-LLM's own Prometheus series (`trtllm_...`): its MetricsCollector [M], fed as its server feeds it [Z]."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from services.engines.adapter.series import series_text
from services.engines.trtllm.api import RequestOutput

PREFIX = "trtllm_"

_log = logging.getLogger(__name__)


class OwnMetrics:
    """The series of one engine; a process has one: its collector registers them with the process's registry.

    What the collector can't take is told once and costs no request.
    """

    def __init__(self, make_collector: Callable[[dict[str, str]], Any], model: str) -> None:
        self._collector = make_collector({"model_name": model, "engine_type": "trtllm"})
        self._has_warned = False

    def note_iteration(self, statistics: Mapping[str, Any]) -> None:
        """Take one iteration's statistics."""
        self._feed(self._collector.log_iteration_stats, statistics)

    def note_result(self, output: RequestOutput) -> None:
        """Take a result: with the last one come the request's metrics (one dict a choice; older releases, one in all)
        [R]."""
        if not output.finished:
            return
        found = getattr(output, "candidate_metrics", None) or [getattr(output, "metrics_dict", None)]
        for metrics in filter(None, found):
            self._feed(self._collector.log_request_metrics_dict, metrics)

    def _feed(self, note: Callable[[Any], None], what: Any) -> None:
        try:
            note(what)
        except Exception as error:
            if not self._has_warned:
                _log.warning("TensorRT-LLM's metrics collector refuses what its engine says", exc_info=error)
            self._has_warned = True


def text() -> bytes:
    """Return the series in Prometheus' text form; any thread may ask."""
    return series_text(PREFIX)
