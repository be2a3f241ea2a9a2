"""One engine of ours in virtual time: the very scheduler, blocks and pass times that serve, on a clock of their own.

Plays the part of services.engines.paged.step_loop.StepLoop, with the agenda for a thread and measured times for a
model: orders are applied between steps, then a step is planned, takes its seconds, and its results are applied.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from deploy.replay.agenda import Agenda, Turn
from deploy.replay.engine_model import StepTimes
from schemas.ids import AttemptId
from schemas.kv_events import KvChange
from services.engines.paged.backlog import Backlog
from services.engines.paged.desk import DeskLoad, Notice
from services.engines.paged.limits import Limits
from services.engines.paged.pass_progress import PassProgress
from services.engines.paged.planner import StepPlan
from services.engines.paged.runner import Sampled, Slice
from services.engines.paged.scheduler import Scheduler

Order = Callable[[float], None]
Hear = Callable[[Sequence[Notice], tuple[KvChange, ...], float], None]


class PagedWorker:
    """`hear` is told what each moment's steps and orders brought: notices, changes of the cache, the time."""

    def __init__(self, limits: Limits, times: StepTimes, agenda: Agenda, hear: Hear) -> None:
        self.scheduler = Scheduler(limits)
        self._times = times
        self._agenda = agenda
        self._hear = hear
        self._progress = PassProgress()
        self._backlog = Backlog()
        self._orders: deque[Order] = deque()
        self._is_awake = False

    def post(self, order: Order, now: float) -> None:
        """Apply an order before the next step; it is passed the time of its application."""
        self._orders.append(order)
        if not self._is_awake:
            self._is_awake = True
            self._agenda.at(now, Turn.PASS_BEGIN, self._begin)

    def submit(self, order: Order, num_prefill_tokens: int, now: float) -> None:
        """Post a request, which counts as load from now on."""

        def apply(then: float) -> None:
            order(then)
            self._backlog.add(-1, -num_prefill_tokens)

        self._backlog.add(1, num_prefill_tokens)
        self.post(apply, now)

    def load(self, now: float) -> DeskLoad:
        """Return the load as the engine would report it."""
        return self._backlog.added_to(self._progress.added_to(self.scheduler.load(), now))

    def _begin(self, now: float) -> None:
        while self._orders:
            self._orders.popleft()(now)
        plan = self.scheduler.schedule(now)
        self._flush(now)
        if plan is None:
            self._is_awake = False
            return
        self._progress.begin(plan, now)
        seconds = self._times.step_s(plan)
        self._agenda.at(now + seconds, Turn.PASS_END, partial(self._end, plan, seconds))

    def _end(self, plan: StepPlan, seconds: float, now: float) -> None:
        self._progress.end(plan, seconds)
        self.scheduler.apply(plan, [_drawn(piece) for piece in plan.slices], now)
        self._flush(now)
        self._agenda.at(now, Turn.PASS_BEGIN, self._begin)

    def _flush(self, now: float) -> None:
        notices, changes = self.scheduler.take(), self.scheduler.cache_changes()
        if notices or changes:
            self._hear(notices, changes, now)


def token_of(attempt_id: AttemptId) -> int:
    """Return the one word of an attempt's answer: no two attempts say the same, so that their KV is never shared."""
    return int(attempt_id)


def _drawn(piece: Slice) -> Sampled | None:
    return None if piece.sample is None else Sampled(token_id=token_of(piece.attempt_id))
