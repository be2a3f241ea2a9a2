"""Workers with our own engine in virtual time: what its handoffs do by pull, and what workers report to routers.

Decode is asked when prefill's result has come to the router; the KV moves once decode has reserved its blocks, and
decode goes on from the first token, which prefill has drawn. Every hop takes the bus its time.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from deploy.replay.agenda import Agenda, Turn
from deploy.replay.engine_model import StepTimes
from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from deploy.replay.paged_worker import PagedWorker, token_of
from deploy.replay.router_side import EPOCH, RouterSide
from deploy.replay.scene import EngineSize, Scene
from schemas.errors import RequestError
from schemas.frames import Begun, Finished, Tokens
from schemas.ids import AttemptId, RequestId, WorkerId
from schemas.kv_events import KvChange, KvCleared, KvStored
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import LoadReport, Role
from services.engines.paged.desk import BlocksReserved, DeskLoad, Notice, PromptComputed
from services.engines.paged.limits import Limits
from services.router.kv_feed import names_of
from services.worker.load import PERIOD_S


class _Seat:
    """A worker, its place in the fleet, and what it has reported. `held`: its cache as told to the router."""

    def __init__(self, role: Role, number: int) -> None:
        self.role = role
        self.worker_id = WorkerId(f"{role}-{number}")
        self.worker: PagedWorker
        self.highest_dispatch = 0
        self.num_reports = 0
        self.will_report = False
        self.held: set[int] = set()


class PagedFleet:
    """See simulation.Fleet."""

    def __init__(self, scene: Scene, times: StepTimes, agenda: Agenda, router: RouterSide, outcome: Outcome) -> None:
        self._scene = scene
        self._agenda = agenda
        self._router = router
        self._outcome = outcome
        self._limits = limits_of(scene.size)
        self._prefill = [self._seat("prefill", number, times) for number in range(scene.num_prefill)]
        self._decode = [self._seat("decode", number, times) for number in range(scene.num_decode)]
        self._jobs: dict[AttemptId, tuple[Job, GenerateRequest]] = {}

    def arrive(self, job: Job, now: float) -> None:
        """See Fleet. A request that no pool can hold is refused, as live."""
        request = request_of(job)
        try:
            self._limits.check_hold(request)
            self._limits.check_decode(request)
        except RequestError:
            self._outcome.num_refused += 1
            return
        self._jobs[request.attempt_id] = job, request
        self._router.hear(now)
        number = self._router.choose_prefill(job, now)
        if job.is_local:
            job.decode_worker, job.decode_dispatch = number, job.dispatch
            self._later(now, partial(self._whole_asked, job, request))
        else:
            job.prefill_worker = number
            self._later(now, partial(self._prefill_asked, job, request))

    def settle(self) -> None:
        """See Fleet: everything is on the agenda."""

    def check_empty(self) -> None:
        """See Fleet."""
        assert not self._jobs
        for seat in (*self._prefill, *self._decode):
            load = seat.worker.scheduler.load()
            busy = (load.running, load.waiting, load.num_held, load.kv_blocks_used, load.queued_prefill_tokens)
            assert busy == (0, 0, 0, 0, 0), seat.worker_id
            assert load.kv_blocks_cached == len(seat.held), seat.worker_id

    def cached_blocks(self) -> set[int]:
        """See Fleet."""
        return set().union(*(seat.held for seat in (*self._prefill, *self._decode)))

    def _prefill_asked(self, job: Job, request: GenerateRequest, now: float) -> None:
        seat = self._prefill[job.prefill_worker]
        seat.highest_dispatch = max(seat.highest_dispatch, job.dispatch)
        scheduler = seat.worker.scheduler
        seat.worker.submit(lambda then: scheduler.hold(request, then, report_chunks=False), job.num_tokens, now)
        self._news(seat, now)

    def _whole_asked(self, job: Job, request: GenerateRequest, now: float) -> None:
        """The prompt stays on a decode worker."""
        seat = self._decode[job.decode_worker]
        seat.highest_dispatch = max(seat.highest_dispatch, job.decode_dispatch)
        scheduler = seat.worker.scheduler
        seat.worker.submit(lambda then: scheduler.generate(request, then), job.num_tokens, now)
        self._news(seat, now)

    def _decode_asked(self, job: Job, request: GenerateRequest, now: float) -> None:
        seat = self._decode[job.decode_worker]
        seat.highest_dispatch = max(seat.highest_dispatch, job.decode_dispatch)
        scheduler = seat.worker.scheduler
        seat.worker.submit(lambda then: scheduler.reserve(request, then), 0, now)
        self._news(seat, now)

    def _heard(self, seat: _Seat, notices: Sequence[Notice], changes: tuple[KvChange, ...], now: float) -> None:
        """Take what a worker's engine tells."""
        if changes:
            self._cache_changed(seat, changes, now)
        gaps: Counter[float] = Counter()
        for notice in notices:
            match notice:
                case Tokens():
                    self._token(notice.attempt_id, gaps, now)
                case PromptComputed():
                    self._prompt_computed(seat, notice, now)
                case BlocksReserved():
                    self._blocks_reserved(notice, now)
                case Finished():
                    self._decoded(notice)
                    self._finished(seat, notice.attempt_id, now)
                case Begun():
                    pass  # a replay keeps times of its own
                case _:
                    raise AssertionError(f"nobody asked for {notice}")
        for gap_s, count in gaps.items():
            self._outcome.gaps(gap_s, count)

    def _token(self, attempt_id: AttemptId, gaps: Counter[float], now: float) -> None:
        job, _ = self._jobs[attempt_id]
        if job.first_token_s < 0:
            self._outcome.first_token(job, now)
            if job.is_local:
                self._router.tell(now + self._scene.delays.bus_s, partial(self._router.on_stayed, job))
        else:
            gaps[now - job.last_token_at] += 1
        job.last_token_at = now

    def _decoded(self, notice: Finished) -> None:
        """Count the prompt of a request that no prefill worker has seen."""
        job, _ = self._jobs[notice.attempt_id]
        if job.is_local:
            job.num_cached = notice.usage.cached_tokens
            self._outcome.prefilled(job)

    def _prompt_computed(self, seat: _Seat, notice: PromptComputed, now: float) -> None:
        job, request = self._jobs[notice.attempt_id]
        job.prefilled_at, job.num_cached = now, notice.num_cached_tokens
        self._outcome.prefilled(job)
        self._news(seat, now)
        self._router.tell(now + self._scene.delays.bus_s, partial(self._router.on_prefilled, job))
        if notice.finish_reason is None:
            self._later(now, partial(self._hand_over, job, request))
        else:  # the first token was the last: there is no decode leg
            self._outcome.first_token(job, now)
            self._finished(seat, notice.attempt_id, now)

    def _hand_over(self, job: Job, request: GenerateRequest, now: float) -> None:
        """Prefill's result has come to the router."""
        self._router.hear(now)
        job.decode_worker = self._router.choose_decode(job, now)
        self._later(now, partial(self._decode_asked, job, request))

    def _blocks_reserved(self, notice: BlocksReserved, now: float) -> None:
        job, _ = self._jobs[notice.attempt_id]
        num_tokens = job.num_tokens - notice.num_cached_blocks * self._limits.block_size
        due = now + self._scene.transfer_s(num_tokens)
        self._agenda.at(due, Turn.ACTIVATION, partial(self._transferred, job, notice.attempt_id))

    def _transferred(self, job: Job, attempt_id: AttemptId, now: float) -> None:
        source, target = self._prefill[job.prefill_worker].worker, self._decode[job.decode_worker].worker
        target.post(
            lambda then: target.scheduler.begin(
                attempt_id,
                then,
                first_token_id=token_of(attempt_id),
                first_logprobs=None,
                num_cached_tokens=job.num_cached,
            ),
            now,
        )
        source.post(lambda then: source.scheduler.release(attempt_id), now)

    def _finished(self, seat: _Seat, attempt_id: AttemptId, now: float) -> None:
        job, _ = self._jobs.pop(attempt_id)
        self._outcome.finished(job, now)
        self._news(seat, now)

    def _cache_changed(self, seat: _Seat, changes: tuple[KvChange, ...], now: float) -> None:
        for change in changes:
            note_change(seat.held, change)
        due = now + self._scene.delays.bus_s
        self._router.tell(due, partial(self._router.on_changes, seat.worker_id, changes))
        if seat.role == "prefill":  # as services.worker.legs.LegDesk.emit
            self._news(seat, now)

    def _news(self, seat: _Seat, now: float) -> None:
        if not seat.will_report:
            seat.will_report = True
            self._agenda.at(now + self._scene.delays.coalesce_s, Turn.REPORT, partial(self._report, seat))

    def _report_again(self, seat: _Seat, num_reports: int, now: float) -> None:
        if seat.num_reports == num_reports and not seat.will_report:
            self._report(seat, now)

    def _report(self, seat: _Seat, now: float) -> None:
        """Report, and again after a while without news: an idle worker has nothing else to say until there are some."""
        seat.will_report, seat.num_reports = False, seat.num_reports + 1
        load = seat.worker.load(now)
        is_prefill = seat.role == "prefill"
        value = load.queued_prefill_tokens if is_prefill else load.kv_blocks_used * self._limits.block_size
        self._outcome.load(seat.worker_id, now, value)
        report = report_of(seat.worker_id, load, seat.highest_dispatch)
        due = now + self._scene.delays.bus_s
        self._router.tell(due, partial(self._router.on_report, report, due))
        if load.running + load.waiting + load.num_held:
            again = partial(self._report_again, seat, seat.num_reports)
            self._agenda.at(now + PERIOD_S, Turn.REPORT, again)

    def _later(self, now: float, action: partial[None]) -> None:
        self._agenda.at(now + self._scene.delays.bus_s, Turn.ARRIVAL, action)

    def _seat(self, role: Role, number: int, times: StepTimes) -> _Seat:
        seat = _Seat(role, number)
        seat.worker = PagedWorker(self._limits, times, self._agenda, partial(self._heard, seat))
        return seat


def limits_of(size: EngineSize) -> Limits:
    """Return the limits of a modelled engine, whose context is as long as its pool."""
    return Limits(
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_num_seqs=size.max_num_seqs,
        max_batched_tokens=size.max_batched_tokens,
        max_context_tokens=size.num_blocks * size.block_size + 1,
    )


def request_of(job: Job) -> GenerateRequest:
    """Return a trace's request as the bus would carry it."""
    return GenerateRequest(
        request_id=RequestId(str(job.number)),
        attempt_id=AttemptId(str(job.number)),
        model="replay",
        token_ids=tuple(job.request.token_ids().tolist()),
        sampling=Sampling(seed=0, temperature=0.0),
        stop=StopConditions(max_tokens=job.request.max_tokens, ignore_eos=True),
        stream=StreamAddress(subject="replay"),
    )


def report_of(worker_id: WorkerId, load: DeskLoad, highest_dispatch: int) -> LoadReport:
    """Return what services.worker.load.LoadReporter would say."""
    return LoadReport(
        worker_id=worker_id,
        epoch=EPOCH,
        running=load.running,
        waiting=load.waiting,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_cached=load.kv_blocks_cached,
        kv_blocks_total=load.kv_blocks_total,
        queued_prefill_tokens=load.queued_prefill_tokens,
        pass_tokens=load.pass_tokens,
        pass_age_s=load.pass_age_s,
        prefill_cost=load.prefill_cost,
        dispatched={str(EPOCH): highest_dispatch},
    )


def note_change(held: set[int], change: KvChange) -> None:
    """Keep a mirror of a cache."""
    if isinstance(change, KvCleared):
        held.clear()
    elif isinstance(change, KvStored):
        held.update(names_of(change.blocks).tolist())
    else:
        held.difference_update(names_of(change.blocks).tolist())
