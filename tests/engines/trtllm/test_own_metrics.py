"""What TensorRT-LLM's collector is fed with, and what becomes of what it can't take."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from services.engines.trtllm.own_metrics import OwnMetrics


class Collector:
    """Notes what it is given; raises on what has no `good` in it."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.seen: list[Any] = []

    def log_request_metrics_dict(self, metrics: dict[str, Any]) -> None:
        self.seen.append(metrics["good"])

    def log_iteration_stats(self, statistics: dict[str, Any]) -> None:
        self.seen.append(statistics["good"])


def fed(*outputs: Any) -> Collector:
    made: list[Collector] = []

    def make(labels: dict[str, str]) -> Collector:
        made.append(Collector(labels))
        return made[0]

    metrics = OwnMetrics(make, "a-model")
    for output in outputs:
        metrics.note_result(output)
    metrics.note_iteration({"good": "iteration"})
    return made[0]


def test_a_request_counts_once_with_its_last_result_in_either_form() -> None:
    found = fed(
        SimpleNamespace(finished=False, candidate_metrics=[{"good": 0}]),
        SimpleNamespace(finished=True, candidate_metrics=[{"good": 1}], metrics_dict={"good": 9}),
        SimpleNamespace(finished=True, metrics_dict={"good": 2}),
        SimpleNamespace(finished=True, candidate_metrics=[], metrics_dict={}),
        SimpleNamespace(finished=True),
    )
    assert found.seen == [1, 2, "iteration"]
    assert found.labels == {"model_name": "a-model", "engine_type": "trtllm"}


def test_what_the_collector_cannot_take_is_told_once_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad = SimpleNamespace(finished=True, metrics_dict={"bad": 1})
    assert fed(bad, bad, bad).seen == ["iteration"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
