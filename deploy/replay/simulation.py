"""A trace played in virtual time: arrivals, passes, handoffs, and what the router hears of them, late.

Order of things at one instant: arrivals, ends of passes, then begins (so that prompts that come together share a
pass), then load reports.
"""

import heapq
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from itertools import count
from math import inf

import msgspec
import numpy as np

from deploy.replay.decode_worker import DecodeWorker
from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from deploy.replay.prefill_worker import EngineSize, PrefillWorker
from deploy.replay.router_side import EPOCH, RouterSettings, RouterSide
from deploy.replay.timing import DynamoTiming
from deploy.replay.trace import TraceRequest
from schemas.ids import Epoch, WorkerId
from schemas.worker import LoadReport, Role, RuntimeConfig
from services.pass_times import PassTimes
from services.prefix_hash import block_hashes


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows comes this late. `bus_s`: any message (a hop over a nats-server on the same network is
    0.1-0.3 ms and an event loop's turn as much again; 1 ms is on the safe side). `coalesce_s`: a load report waits so
    long for more news (services/worker/load.py)."""

    bus_s: float = 0.001
    coalesce_s: float = 0.005


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet. `kv_bytes_per_token` and `gb_per_s` make a transfer take time; 0: none, as in Dynamo's replay."""

    num_prefill: int
    num_decode: int
    router: RouterSettings = RouterSettings()
    size: EngineSize = EngineSize()
    timing: DynamoTiming = DynamoTiming()
    delays: Delays = Delays()
    kv_bytes_per_token: int = 0
    gb_per_s: float = 0.0


class Turn(IntEnum):
    """Who goes first at one instant."""

    ARRIVAL = 0
    PASS_END = 1
    ACTIVATION = 2
    PASS_BEGIN = 3
    REPORT = 4


class _Seat:
    """A prefill worker and what it measures and reports."""

    def __init__(self, worker: PrefillWorker, worker_id: WorkerId) -> None:
        self.worker = worker
        self.worker_id = worker_id
        self.times = PassTimes()
        self.highest_dispatch = 0
        self.will_report = False
        self.will_begin = False


class Simulation:
    """One replay: `run` returns what it measured."""

    def __init__(self, scene: Scene) -> None:
        self.outcome = Outcome()
        self._scene = scene
        configs = [config_of(scene.size, "prefill", number) for number in range(scene.num_prefill)]
        self._seats = [_Seat(PrefillWorker(scene.size, scene.timing), one.worker_id) for one in configs]
        decoders = [config_of(scene.size, "decode", number) for number in range(scene.num_decode)]
        self._decoders = [self._decoder(number) for number in range(scene.num_decode)]
        self._highest_at_decode = [0] * scene.num_decode
        self._router = RouterSide(scene.router, configs, decoders, self.outcome)
        self._agenda: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Play all requests to their ends."""
        for number, request in enumerate(requests):
            self._at(request.arrival_s, Turn.ARRIVAL, partial(self._arrive, number, request))
        agenda = self._agenda
        while agenda:
            now, _, _, action = heapq.heappop(agenda)
            action(now)
            if not agenda:
                self._advance_decoders(inf)
        return self.outcome

    def check_empty(self) -> None:
        """Raise AssertionError unless every block and slot is free again: what a finished replay must leave."""
        for seat in self._seats:
            worker = seat.worker
            assert worker.pool.num_available == worker.pool.num_blocks
            assert not worker.waiting
            assert not worker.running
        for decoder in self._decoders:
            load = decoder.load
            assert (load.num_blocks, load.num_tokens, load.num_reserved, decoder.num_requests) == (0, 0, 0, 0)

    def index_drift(self) -> int:
        """Return how many blocks the router's index, once it has heard everything, has too many or too few."""
        self._router.hear(inf)
        held = set().union(*(seat.worker.pool.keys() for seat in self._seats))
        return abs(self._router.num_indexed_blocks - len(held))

    def _at(self, when: float, turn: Turn, action: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (when, turn, next(self._order), action))

    def _arrive(self, number: int, request: TraceRequest, now: float) -> None:
        hashes = block_hashes(request.token_ids(), self._scene.size.block_size)
        job = Job(number=number, request=request, hashes=hashes, keys=hashes.tolist())
        self._router.hear(now)
        job.prefill_worker = self._router.choose_prefill(job, now)
        seat = self._seats[job.prefill_worker]
        seat.highest_dispatch = job.dispatch
        seat.worker.waiting.append(job)
        self._begin_soon(seat, now)
        self._report_soon(seat, now)

    def _begin_soon(self, seat: _Seat, now: float) -> None:
        if not seat.will_begin and not seat.worker.is_busy:
            seat.will_begin = True
            self._at(now, Turn.PASS_BEGIN, partial(self._begin, seat))

    def _begin(self, seat: _Seat, now: float) -> None:
        seat.will_begin = False
        end = seat.worker.begin_pass(now)
        if end is not None:
            self._at(end, Turn.PASS_END, partial(self._end, seat))
            self._report_soon(seat, now)

    def _end(self, seat: _Seat, now: float) -> None:
        worker, router, bus_s = seat.worker, self._router, self._scene.delays.bus_s
        seat.times.note(worker.pass_tokens, now - worker.pass_start)
        done = worker.end_pass()
        self._tell_events(seat, now)
        for job in done:
            job.prefilled_at = now
            self.outcome.prefilled(job)
            router.tell(now + bus_s, partial(router.on_prefilled, job))
            self._hand_over(job, now)
        self._begin_soon(seat, now)
        self._report_soon(seat, now)

    def _tell_events(self, seat: _Seat, now: float) -> None:
        pool = seat.worker.pool
        if pool.evicted or pool.stored:
            removed, stored = (np.array(one, dtype=np.uint64) for one in (pool.evicted, pool.stored))
            pool.evicted, pool.stored = [], []
            due = now + self._scene.delays.bus_s
            self._router.tell(due, partial(self._router.on_events, seat.worker_id, removed, stored))

    def _hand_over(self, job: Job, now: float) -> None:
        self._advance_decoders(now)
        self._router.hear(now)
        number = job.decode_worker = self._router.choose_decode(job, now)
        self._highest_at_decode[number] = job.decode_dispatch
        self._decoders[number].take(job, now)
        self._watch_queue(self._decoders[number])

    def _advance_decoders(self, until: float) -> None:
        for decoder in self._decoders:
            decoder.advance(until)

    def _watch_queue(self, decoder: DecodeWorker) -> None:
        """A destination that is waited for must not be found late: its prefill blocks are held meanwhile."""
        if decoder.waiting and decoder.pass_end < inf:
            self._at(decoder.pass_end, Turn.PASS_END, partial(self._look, decoder))

    def _look(self, decoder: DecodeWorker, now: float) -> None:
        decoder.advance(now)
        self._watch_queue(decoder)

    def _reserved(self, job: Job, now: float) -> None:
        scene = self._scene
        num_bytes = job.num_tokens * scene.kv_bytes_per_token
        transfer_s = num_bytes / (scene.gb_per_s * 1e9) if scene.gb_per_s else 0.0
        if transfer_s:
            self._at(now + transfer_s, Turn.ACTIVATION, partial(self._activate, job))
        else:
            self._activate(job, now)

    def _activate(self, job: Job, now: float) -> None:
        self._decoders[job.decode_worker].activate(job, now)
        seat = self._seats[job.prefill_worker]
        seat.worker.release(job)
        if seat.worker.waiting or seat.worker.running:
            self._begin_soon(seat, now)

    def _report_soon(self, seat: _Seat, now: float) -> None:
        if not seat.will_report:
            seat.will_report = True
            self._at(now + self._scene.delays.coalesce_s, Turn.REPORT, partial(self._report, seat))

    def _report(self, seat: _Seat, now: float) -> None:
        seat.will_report = False
        worker, pool = seat.worker, seat.worker.pool
        report = LoadReport(
            worker_id=seat.worker_id,
            epoch=EPOCH,
            running=len(worker.running),
            waiting=len(worker.waiting),
            kv_blocks_used=pool.num_blocks - pool.num_available,
            kv_blocks_cached=pool.num_cached,
            kv_blocks_total=pool.num_blocks,
            queued_prefill_tokens=worker.queued_tokens,
            pass_tokens=worker.pass_tokens,
            pass_age_s=now - worker.pass_start if worker.is_busy else 0.0,
            prefill_cost=seat.times.cost(),
            dispatched={str(EPOCH): seat.highest_dispatch},
        )
        self.outcome.load(seat.worker_id, now, report.queued_prefill_tokens)
        self._tell_report(report, now)

    def _report_decode(self, number: int, now: float) -> None:
        decoder = self._decoders[number]
        report = LoadReport(
            worker_id=WorkerId(f"decode-{number}"),
            epoch=EPOCH,
            running=decoder.num_requests - len(decoder.waiting),
            waiting=len(decoder.waiting),
            kv_blocks_used=decoder.load.num_blocks,
            kv_blocks_cached=0,
            kv_blocks_total=self._scene.size.num_blocks,
            dispatched={str(EPOCH): self._highest_at_decode[number]},
        )
        self.outcome.load(report.worker_id, now, decoder.load.num_tokens)
        self._tell_report(report, now)

    def _tell_report(self, report: LoadReport, now: float) -> None:
        due = now + self._scene.delays.bus_s
        self._router.tell(due, partial(self._router.on_report, report, due))

    def _decoder(self, number: int) -> DecodeWorker:
        scene = self._scene
        return DecodeWorker(
            scene.size,
            scene.timing,
            self.outcome,
            coalesce_s=scene.delays.coalesce_s,
            on_reserved=self._reserved,
            on_report=partial(self._report_decode, number),
        )


def config_of(size: EngineSize, role: Role, number: int) -> RuntimeConfig:
    """Return what a modelled worker would say of itself."""
    return RuntimeConfig(
        worker_id=WorkerId(f"{role}-{number}"),
        epoch=Epoch(1),
        model="replay",
        model_digest="replay",
        role=role,
        backend="replay",
        state="ready",
        handoff="after_prefill",
        compat="replay",
        block_size=size.block_size,
        total_kv_blocks=size.num_blocks,
        max_num_seqs=size.max_num_seqs,
        max_batched_tokens=size.max_batched_tokens,
        max_context_tokens=1 << 30,
    )
