"""The loop of the engine's thread: apply orders, plan, execute, tell. Blocked, not polling, when there is no work."""

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf

from schemas.ids import AttemptId
from services.engines.paged.desk import Notice
from services.engines.paged.outbox import Outbox, Unmute
from services.engines.paged.pass_progress import PassProgress
from services.engines.paged.runner import ModelRunner
from services.engines.paged.scheduler import Scheduler
from services.engines.protocol import CacheChanged

Order = Callable[[float], None]


class StepLoop:
    """`post` and `stop` may be called from any thread; the rest runs on the engine's. Times are monotonic seconds."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, outbox: Outbox) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._outbox = outbox
        self._orders: deque[Order] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._told: list[Notice | Unmute] = []
        self.progress = PassProgress()

    def post(self, order: Order) -> None:
        """Apply an order before the next step; it is passed the time of its application."""
        self._orders.append(order)
        self._wake.set()

    def stop(self) -> None:
        """End the loop after the step under way."""
        self._is_stopping = True
        self._wake.set()

    def unmute(self, attempt_id: AttemptId) -> None:
        """Tell the outbox that an abort has been applied: behind all notices so far, before those of an attempt of the
        same id that comes in the same turn."""
        self._told += [*self._scheduler.take(), Unmute(attempt_id)]

    def run(self) -> None:
        """Step until stopped; raises what the runner raises."""
        scheduler, execute = self._scheduler, self._runner.execute
        while not self._is_stopping:
            self._apply_orders()
            plan = scheduler.schedule(time.monotonic())
            self._flush()
            if plan is None:
                self._idle()
                continue
            started = self.progress.begin(plan, time.monotonic())
            sampled = execute(plan.slices)
            self.progress.end(plan, time.monotonic() - started)
            scheduler.apply(plan, sampled, time.monotonic())
            self._flush()

    def _apply_orders(self) -> None:
        orders = self._orders
        while orders:
            orders.popleft()(time.monotonic())

    def _flush(self) -> None:
        notices, self._told = [*self._told, *self._scheduler.take()], []
        changes = self._scheduler.cache_changes()
        if changes:  # first: whoever hears that a prompt is done may ask what is cached
            notices.insert(0, CacheChanged(changes=changes))
        if notices:
            self._outbox.put(notices)

    def _idle(self) -> None:
        deadline = self._scheduler.next_deadline
        timeout_s = None if deadline == inf else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        self._wake.wait(timeout_s)
        # Cleared before the orders are looked at: one posted from here on sets it again.
        self._wake.clear()
