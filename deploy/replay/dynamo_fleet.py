"""Workers under Dynamo's rules in virtual time: passes, handoffs, and what they report.

Its replay's own batching, not ours (PrefillWorker, DecodeWorker), so that policies are compared on equal terms.
"""

from functools import partial
from math import inf

import numpy as np

from deploy.replay.agenda import Agenda, Turn
from deploy.replay.decode_worker import DecodeWorker
from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from deploy.replay.prefill_worker import PrefillWorker
from deploy.replay.router_side import EPOCH, RouterSide
from deploy.replay.scene import Scene
from deploy.replay.timing import DynamoTiming
from schemas.ids import WorkerId
from schemas.worker import LoadReport
from services.pass_times import PassTimes


class _Seat:
    """A prefill worker and what it measures and reports."""

    def __init__(self, worker: PrefillWorker, worker_id: WorkerId) -> None:
        self.worker = worker
        self.worker_id = worker_id
        self.times = PassTimes()
        self.highest_dispatch = 0
        self.will_report = False
        self.will_begin = False


class DynamoFleet:
    """See simulation.Fleet."""

    def __init__(
        self, scene: Scene, timing: DynamoTiming, agenda: Agenda, router: RouterSide, outcome: Outcome
    ) -> None:
        self._scene = scene
        self._agenda = agenda
        self._router = router
        self._outcome = outcome
        self._seats = [
            _Seat(PrefillWorker(scene.size, timing), WorkerId(f"prefill-{number}"))
            for number in range(scene.num_prefill)
        ]
        self._decoders = [self._decoder(number, timing) for number in range(scene.num_decode)]
        self._highest_at_decode = [0] * scene.num_decode

    def arrive(self, job: Job, now: float) -> None:
        """See Fleet."""
        job.keys = job.hashes.tolist()
        if self._router.keeps_prompts_on_decode:
            self._advance_decoders(now)
        self._router.hear(now)
        number = self._router.choose_prefill(job, now)
        if job.is_local:
            self._stay(job, number, now)
            return
        job.prefill_worker = number
        seat = self._seats[number]
        seat.highest_dispatch = job.dispatch
        seat.worker.waiting.append(job)
        self._begin_soon(seat, now)
        self._report_soon(seat, now)

    def settle(self) -> None:
        """See Fleet: decode workers are only looked at when somebody asks."""
        self._advance_decoders(inf)

    def check_empty(self) -> None:
        """See Fleet."""
        for seat in self._seats:
            worker = seat.worker
            assert worker.pool.num_available == worker.pool.num_blocks
            assert not worker.waiting
            assert not worker.running
        for decoder in self._decoders:
            load = decoder.load
            assert (load.num_blocks, load.num_tokens, load.num_reserved, decoder.num_requests) == (0, 0, 0, 0)

    def cached_blocks(self) -> set[int]:
        """See Fleet."""
        return set().union(*(seat.worker.pool.keys() for seat in self._seats))

    def _begin_soon(self, seat: _Seat, now: float) -> None:
        if not seat.will_begin and not seat.worker.is_busy:
            seat.will_begin = True
            self._agenda.at(now, Turn.PASS_BEGIN, partial(self._begin, seat))

    def _begin(self, seat: _Seat, now: float) -> None:
        seat.will_begin = False
        end = seat.worker.begin_pass(now)
        if end is not None:
            self._agenda.at(end, Turn.PASS_END, partial(self._end, seat))
            self._report_soon(seat, now)

    def _end(self, seat: _Seat, now: float) -> None:
        worker, router, bus_s = seat.worker, self._router, self._scene.delays.bus_s
        seat.times.note(worker.pass_tokens, now - worker.pass_start)
        done = worker.end_pass()
        self._tell_events(seat, now)
        for job in done:
            job.prefilled_at = now
            self._outcome.prefilled(job)
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

    def _stay(self, job: Job, number: int, now: float) -> None:
        """Let a decode worker compute the prompt. It keeps no prefixes, so that nothing is cached there for others."""
        self._router.on_stayed(job)
        job.decode_worker, job.decode_dispatch, job.num_cached = number, job.dispatch, 0
        self._outcome.prefilled(job)
        self._highest_at_decode[number] = job.decode_dispatch
        self._decoders[number].take(job, now)
        self._watch_queue(self._decoders[number])

    def _advance_decoders(self, until: float) -> None:
        for decoder in self._decoders:
            decoder.advance(until)

    def _watch_queue(self, decoder: DecodeWorker) -> None:
        """A destination that is waited for must not be found late: its prefill blocks are held meanwhile."""
        if decoder.waiting and decoder.pass_end < inf:
            self._agenda.at(decoder.pass_end, Turn.PASS_END, partial(self._look, decoder))

    def _look(self, decoder: DecodeWorker, now: float) -> None:
        decoder.advance(now)
        self._watch_queue(decoder)

    def _reserved(self, job: Job, now: float) -> None:
        transfer_s = self._scene.transfer_s(job.num_tokens)
        if transfer_s:
            self._agenda.at(now + transfer_s, Turn.ACTIVATION, partial(self._activate, job))
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
            self._agenda.at(now + self._scene.delays.coalesce_s, Turn.REPORT, partial(self._report, seat))

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
        self._outcome.load(seat.worker_id, now, report.queued_prefill_tokens)
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
            queued_prefill_tokens=decoder.num_queued_tokens,
            dispatched={str(EPOCH): self._highest_at_decode[number]},
        )
        self._outcome.load(report.worker_id, now, decoder.load.num_tokens)
        self._tell_report(report, now)

    def _tell_report(self, report: LoadReport, now: float) -> None:
        due = now + self._scene.delays.bus_s
        self._router.tell(due, partial(self._router.on_report, report, due))

    def _decoder(self, number: int, timing: DynamoTiming) -> DecodeWorker:
        scene = self._scene
        return DecodeWorker(
            scene.size,
            timing,
            self._outcome,
            coalesce_s=scene.delays.coalesce_s,
            on_reserved=self._reserved,
            on_report=partial(self._report_decode, number),
        )
