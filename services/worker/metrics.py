"""The worker's own /metrics, where `worker.metrics_listen` says: the engine's series under the engine's names.

What routers and the gateway need of a worker goes over the bus and is on the gateway's /metrics. An engine's own series
are many and change with its versions, so they are scraped where they are made, and busway only passes them on.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from schemas.errors import RequestError
from schemas.worker import RuntimeConfig
from services.engines.protocol import OwnMetrics

logger = logging.getLogger(__name__)

READ_S = 5.0
MAX_SERIES = 20_000


class EngineSeries:
    """Reads the engine's series when scraped, on a scrape's own thread; whole families above MAX_SERIES are left out
    and counted."""

    def __init__(self, read: OwnMetrics, loop: asyncio.AbstractEventLoop) -> None:
        self._read = read
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's families, and whether it answered."""
        num_left_out = num_given = 0
        families = self._families()
        for family in families or ():
            if num_given + len(family.samples) > MAX_SERIES:
                num_left_out += len(family.samples)
            else:
                num_given += len(family.samples)
                yield family
        yield GaugeMetricFamily(
            "busway_engine_metrics_up", "Whether the engine gave its own series", value=families is not None
        )
        yield GaugeMetricFamily(
            "busway_engine_series_left_out", f"Series above the limit of {MAX_SERIES}", value=num_left_out
        )

    def _families(self) -> list[Metric] | None:
        asked = asyncio.run_coroutine_threadsafe(_bounded(self._read), self._loop)
        try:
            return list(text_string_to_metric_families(asked.result(READ_S + 1.0).decode()))
        except Exception as error:
            logger.warning("the engine gave no metrics: %s: %s", type(error).__name__, error)
            return None


async def _bounded(read: OwnMetrics) -> bytes:
    async with asyncio.timeout(READ_S):
        return await read()


@contextlib.asynccontextmanager
async def open_metrics(listen: str, me: RuntimeConfig, own: OwnMetrics | None) -> AsyncIterator[str]:
    """Serve /metrics on `listen` (HOST:PORT; port 0 takes a free one) for the length of the block, and yield its URL.

    Raises RequestError for an address that can't be read, OSError for one that can't be had.
    """
    host, port = _address(listen)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Info(me))
    if own is not None:
        registry.register(EngineSeries(own, asyncio.get_running_loop()))
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


class _Info:
    def __init__(self, me: RuntimeConfig) -> None:
        self._labels = {"worker": str(me.worker_id), "model": me.model, "role": me.role}
        self._labels |= {"engine": me.backend, "engine_version": me.engine_version}

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("busway_worker", "What this worker is", value=self._labels)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RequestError(f"metrics_listen is HOST:PORT, not {listen!r}", param="metrics_listen")
    return host.strip("[]"), int(port)
