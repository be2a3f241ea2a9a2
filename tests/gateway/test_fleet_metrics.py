"""What is remembered of workers is what those that are there have said."""

import msgspec

from schemas.ids import Epoch, WorkerId
from schemas.message import encode
from schemas.worker import LoadReport, RuntimeConfig
from services.gateway.fleet_metrics import FleetMetrics
from tests.gateway.conftest import runtime_config

WORKER = WorkerId("w1")
REPORT = LoadReport(
    worker_id=WORKER, epoch=Epoch(1), running=3, waiting=0, kv_blocks_used=5, kv_blocks_cached=0, kv_blocks_total=10
)


def running(metrics: FleetMetrics) -> list[float]:
    (gauge,) = [one for one in metrics.collect() if one.name == "busway_requests_running"]
    return [sample.value for sample in gauge.samples]


def test_a_worker_that_left_or_isnt_there_yet_is_remembered_nowhere() -> None:
    workers: dict[WorkerId, RuntimeConfig] = {}
    metrics = FleetMetrics(workers, lambda: 1)
    metrics.hear("", encode(REPORT))
    workers[WORKER] = runtime_config(WORKER, "decode")
    assert running(metrics) == []
    metrics.hear("", encode(REPORT))
    metrics.hear("", encode(msgspec.structs.replace(REPORT, epoch=Epoch(0), running=9)))
    assert running(metrics) == [3]
    metrics.forget(WORKER)
    assert running(metrics) == []
