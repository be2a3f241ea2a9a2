"""A worker's own /metrics: the engine's series pass through under their own names, and can't drown the scrape."""

import asyncio
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from bus.connection import Bus
from bus.server import NatsServer
from schemas.errors import RequestError
from schemas.ids import Epoch, WorkerId
from schemas.worker import RuntimeConfig
from services.config import WorkerConfig
from services.engines.registry import make_engine
from services.worker import metrics
from services.worker.identity import runtime_config
from services.worker.metrics import open_metrics
from services.worker.service import run_worker
from tests.worker.test_identity import PROFILE

LISTEN = "127.0.0.1:0"


def me() -> RuntimeConfig:
    return runtime_config(WorkerConfig(role="decode"), PROFILE, WorkerId("w"), Epoch(1))


def engine_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    tokens = Counter("engine:prompt_tokens", "Prompt tokens", ["model_name"], registry=registry)
    tokens.labels("m").inc(7)
    Histogram("engine:step_seconds", "Steps", registry=registry, buckets=(0.1, 1.0)).observe(0.5)
    return registry


async def scrape(url: str) -> dict[str, float]:
    """Return the samples by name and labels, as they are written."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {head: float(value) for head, _, value in (line.rpartition(" ") for line in lines)}


async def test_the_engines_series_keep_their_names_labels_and_kinds() -> None:
    registry = engine_registry()

    async def own() -> bytes:
        return generate_latest(registry)

    async with open_metrics(LISTEN, me(), own) as url:
        seen = await scrape(url)
    assert seen['engine:prompt_tokens_total{model_name="m"}'] == 7
    assert seen['engine:step_seconds_bucket{le="1.0"}'] == 1
    assert seen["engine:step_seconds_count"] == 1
    assert (seen["busway_engine_metrics_up"], seen["busway_engine_series_left_out"]) == (1, 0)
    (info,) = (head for head in seen if head.startswith("busway_worker_info"))
    assert 'worker="w"' in info
    assert 'engine="sim"' in info


async def test_too_many_series_are_left_out_whole_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SERIES", 5)
    registry = engine_registry()
    many = Counter("engine:by_request", "Unbounded", ["request"], registry=registry)
    for number in range(50):
        many.labels(str(number)).inc()

    async def own() -> bytes:
        return generate_latest(registry)

    async with open_metrics(LISTEN, me(), own) as url:
        seen = await scrape(url)
    assert seen['engine:prompt_tokens_total{model_name="m"}'] == 7
    assert not any(head.startswith("engine:by_request") for head in seen)
    assert seen["busway_engine_series_left_out"] >= 50


async def test_an_engine_that_fails_or_hangs_costs_its_series_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "READ_S", 0.2)

    async def fails() -> bytes:
        raise RuntimeError("not today")

    async def hangs() -> bytes:
        await asyncio.sleep(3600)
        raise AssertionError

    for own in (fails, hangs):
        async with open_metrics(LISTEN, me(), own) as url:
            seen = await scrape(url)
        assert seen["busway_engine_metrics_up"] == 0
        assert any(head.startswith("process_") for head in seen)


@pytest.mark.parametrize("listen", ["9100", "host:", "127.0.0.1:70000", ":80"])
async def test_an_address_that_is_none_is_refused_by_name(listen: str) -> None:
    with pytest.raises(RequestError, match="metrics_listen is HOST:PORT"):
        async with open_metrics(listen, me(), None):
            pass


async def test_a_worker_says_where_its_metrics_are_and_stops_serving_them_when_it_leaves(
    nats_server: NatsServer,
) -> None:
    config = WorkerConfig(id="w", role="both", engine="sim", transfer="shm", metrics_listen=LISTEN)
    stop = asyncio.Event()
    ready: asyncio.Future[RuntimeConfig] = asyncio.get_running_loop().create_future()
    async with Bus.connect(nats_server.internal_url, name="w", client_id="w", namespace="metrics") as bus:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_worker(bus, config, make_engine(config), stop=stop, ready=ready.set_result))
            url = (await ready).metrics_url
            seen = await scrape(url)
            assert any(head.startswith("busway_worker_info") for head in seen)
            assert "busway_engine_metrics_up" not in seen, "the sim engine has no series of its own"
            stop.set()
        with pytest.raises(OSError):
            await scrape(url)
