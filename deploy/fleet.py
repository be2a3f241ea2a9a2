"""The fleet as `busway status` shows it: discovery's records, each worker's load, and who can't be paired and why."""

import asyncio
from collections.abc import Iterable
from itertools import product

import msgspec

from bus.connection import Bus
from bus.discovery import watch
from schemas.errors import BusError
from schemas.hop import Ok
from schemas.ids import WorkerId
from schemas.worker import LoadReport, RuntimeConfig, ServiceRecord
from services.router.candidates import short_contexts

LOAD_TIMEOUT_S = 1.0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker. `state` is its own word (starting, ready, draining), or "lost": a record without heartbeats.
    Load is null when the worker did not answer."""

    worker_id: str
    role: str
    model: str
    engine: str
    host: str
    pid: int
    epoch: int
    state: str
    handoff: str
    compat: str
    block_size: int
    max_num_seqs: int
    max_context_tokens: int
    labels: dict[str, str]
    metrics_url: str = ""
    running: int | None = None
    waiting: int | None = None
    kv_blocks_used: int | None = None
    kv_blocks_cached: int | None = None
    kv_blocks_total: int | None = None
    load: LoadReport | None = None


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A router or gateway; `url` is a gateway's."""

    id: str
    host: str
    pid: int
    epoch: int
    state: str
    url: str = ""


class IncompatiblePair(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill and a decode worker of one model that are never matched."""

    model: str
    prefill: str
    decode: str
    reason: str


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerRow]
    routers: list[ServiceRow]
    gateways: list[ServiceRow]
    incompatible: list[IncompatiblePair]
    short_contexts: list[str]


async def read_fleet(bus: Bus) -> FleetStatus:
    """Return the fleet now; takes a heartbeat's time at most when a record has no living owner."""
    async with watch(bus) as fleet:
        await fleet.first_beats()  # who is silent until then is shown as lost
        records = list(fleet.all_records.values())
        workers = [record for record in records if isinstance(record, RuntimeConfig)]
        loads = await _loads(bus, [worker for worker in workers if worker.worker_id in fleet.workers])
        return FleetStatus(
            workers=sorted(
                (worker_row(it, it.worker_id in fleet.workers, loads.get(it.worker_id)) for it in workers),
                key=lambda row: (row.model, row.role, row.worker_id),
            ),
            routers=_service_rows(records, "router", fleet.routers),
            gateways=_service_rows(records, "gateway", fleet.gateways),
            incompatible=incompatible_pairs(workers),
            short_contexts=short_contexts(worker for worker in workers if worker.worker_id in fleet.workers),
        )


def incompatible_pairs(workers: Iterable[RuntimeConfig]) -> list[IncompatiblePair]:
    """Return each prefill and decode worker of one model that can't hand over KV, with the reason."""
    fleet = list(workers)
    prefills = [worker for worker in fleet if worker.role == "prefill"]
    decodes = [worker for worker in fleet if worker.role == "decode"]
    return [
        IncompatiblePair(model=prefill.model, prefill=prefill.worker_id, decode=decode.worker_id, reason=reason)
        for prefill, decode in product(prefills, decodes)
        if prefill.model == decode.model and (reason := why_incompatible(prefill, decode))
    ]


def why_incompatible(prefill: RuntimeConfig, decode: RuntimeConfig) -> str:
    """Return why these two can't be paired, or "" when they can."""
    if prefill.compat == decode.compat and prefill.handoff == decode.handoff:
        return ""
    traits = (
        ("backend", prefill.backend, decode.backend),
        ("model digest", prefill.model_digest, decode.model_digest),
        ("handoff", prefill.handoff, decode.handoff),
        ("KV dtype", prefill.kv_dtype, decode.kv_dtype),
        ("block size", prefill.block_size, decode.block_size),
        ("KV layout", prefill.kv_layout, decode.kv_layout),
        ("KV transfer", prefill.kv_transport, decode.kv_transport),
    )
    differences = [f"{name} {mine} != {theirs}" for name, mine, theirs in traits if mine != theirs]
    return "; ".join(differences) or f"compatibility group {prefill.compat} != {decode.compat}"


def worker_row(worker: RuntimeConfig, is_live: bool, load: LoadReport | None) -> WorkerRow:
    """Return a worker's row; capacity comes from its record when it did not report."""
    return WorkerRow(
        worker_id=worker.worker_id,
        role=worker.role,
        model=worker.model,
        engine=worker.backend,
        host=worker.host,
        pid=worker.pid,
        epoch=worker.epoch,
        state=worker.state if is_live else "lost",
        handoff=worker.handoff,
        compat=worker.compat,
        block_size=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_context_tokens=worker.max_context_tokens,
        labels=worker.labels,
        metrics_url=worker.metrics_url,
        running=load.running if load else None,
        waiting=load.waiting if load else None,
        kv_blocks_used=load.kv_blocks_used if load else None,
        kv_blocks_cached=load.kv_blocks_cached if load else None,
        kv_blocks_total=load.kv_blocks_total if load else worker.total_kv_blocks,
        load=load,
    )


async def _loads(bus: Bus, workers: list[RuntimeConfig]) -> dict[WorkerId, LoadReport]:
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(_load(bus, worker.worker_id), name=f"load of {worker.worker_id}") for worker in workers
        ]
    return {report.worker_id: report for task in asked if (report := task.result()) is not None}


async def _load(bus: Bus, worker: WorkerId) -> LoadReport | None:
    """Return a worker's load, or None when it doesn't answer: its row says the rest."""
    try:
        return await bus.ask(bus.subjects.worker(worker, "load"), Ok(), LoadReport, timeout_s=LOAD_TIMEOUT_S)
    except BusError:
        return None


def _service_rows(records: Iterable[object], service: str, live: Iterable[str]) -> list[ServiceRow]:
    living = set(live)
    return sorted(
        (
            ServiceRow(
                id=it.id,
                host=it.host,
                pid=it.pid,
                epoch=it.epoch,
                state=it.state if it.id in living else "lost",
                url=it.url,
            )
            for it in records
            if isinstance(it, ServiceRecord) and it.service == service
        ),
        key=lambda row: row.id,
    )
