"""The engine's own thread as the event loop sees it: it starts and ends it and gives it orders (Desk).

A runner that raises ends the thread; `join` then raises on the event loop, so that the process can exit non-zero.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from msgspec import structs

from schemas.errors import EngineError, ErrorRecord
from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId
from schemas.request import Deadlines, GenerateRequest
from services.engines.paged.backlog import Backlog
from services.engines.paged.desk import DeskLoad, Notify
from services.engines.paged.limits import Limits
from services.engines.paged.outbox import Outbox
from services.engines.paged.runner import AllocateHost, ModelRunner, RunnerSpec
from services.engines.paged.scheduler import Scheduler
from services.engines.paged.step_loop import StepLoop
from services.kv.layout import KvRegion

T = TypeVar("T")
Take = Callable[[GenerateRequest, float], None]
NO_DEADLINES = Deadlines()


class EngineThread:
    """Runs a ModelRunner and implements Desk for one event loop; used once: start, then join or stop.

    Orders are given on that loop's thread. Between `abort` (without error) and the end no notice of the attempt
    is delivered any more, not even one that was under way.
    """

    def __init__(self, runner: ModelRunner, allocate: AllocateHost, *, name: str = "engine") -> None:
        self._runner = runner
        self._allocate = allocate
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._backlog = Backlog()
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[RunnerSpec]
        self._ended: asyncio.Future[None]
        self._left: asyncio.Future[None]
        self._outbox: Outbox
        self._limits: Limits
        self._scheduler: Scheduler
        self._steps: StepLoop

    async def start(self, notify: Notify) -> RunnerSpec:
        """Load the model on the thread and begin to step; raises what loading raises.

        `notify` is called on this event loop with the notices of a step (of several when it fell behind), in order.
        """
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._left = self._loop.create_future()
        self._outbox = Outbox(self._loop, notify, self._end)
        self._thread.start()
        return await asyncio.shield(self._loaded)

    async def join(self) -> None:
        """Wait until the thread was stopped; raises EngineError when it died instead."""
        await asyncio.shield(self._ended)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step under way; a step longer than `timeout_s` is left behind. Idempotent."""
        if not self._thread.ident:
            return
        await asyncio.wait([self._loaded], timeout=timeout_s)
        if self._loaded.done() and self._loaded.exception() is None:
            self._steps.stop()
            self._outbox.close()
        await asyncio.wait([self._left], timeout=timeout_s)
        if self._left.done():
            # Only its return is left to the thread: this doesn't hold up the event loop.
            self._thread.join()

    def region(self) -> KvRegion:
        """Return the KV pool's memory, once started."""
        return self._runner.region()

    def generate(self, request: GenerateRequest) -> None:
        self._limits.check_decode(request)
        num_tokens = len(request.token_ids) + len(request.resume)
        self._submit(request, self._scheduler.generate, num_tokens)

    def hold(self, request: GenerateRequest, *, report_chunks: bool) -> None:
        self._limits.check_hold(request)
        num_tokens = len(request.token_ids) + len(request.resume)
        self._submit(request, partial(self._scheduler.hold, report_chunks=report_chunks), num_tokens)

    def reserve(self, request: GenerateRequest) -> None:
        self._limits.check_decode(request)
        self._submit(request, self._scheduler.reserve, 0)

    def begin(
        self,
        attempt_id: AttemptId,
        *,
        first_token_id: int,
        first_logprobs: TokenLogprobs | None,
        num_cached_tokens: int,
    ) -> None:
        self._steps.post(
            lambda now: self._scheduler.begin(
                attempt_id,
                now,
                first_token_id=first_token_id,
                first_logprobs=first_logprobs,
                num_cached_tokens=num_cached_tokens,
            )
        )

    def recompute(self, attempt_id: AttemptId, *, quarantine: bool = False) -> None:
        self._steps.post(lambda now: self._scheduler.recompute(attempt_id, now, quarantine=quarantine))

    def release(self, attempt_id: AttemptId) -> None:
        self._steps.post(lambda now: self._scheduler.release(attempt_id))

    def abort(self, attempt_id: AttemptId, *, error: ErrorRecord | None = None, quarantine: bool = False) -> None:
        def order(now: float) -> None:
            self._scheduler.abort(attempt_id, error=error, quarantine=quarantine)
            if error is None:
                self._steps.unmute(attempt_id)

        if error is None:
            self._outbox.mute(attempt_id)
        self._steps.post(order)

    def settle(self, attempt_id: AttemptId) -> None:
        self._steps.post(lambda now: self._scheduler.settle(attempt_id))

    def load(self) -> DeskLoad:
        """Return the load, requests not yet applied included."""
        return self._backlog.added_to(self._steps.progress.added_to(self._scheduler.load(), time.monotonic()))

    def _submit(self, request: GenerateRequest, take: Take, num_prefill_tokens: int) -> None:
        """Let the scheduler take a request before the next step; it waits from now on."""
        if self._ended.done():
            raise EngineError("the engine has ended")
        asked_at, request = time.monotonic(), on_monotonic_clock(request)

        def apply(now: float) -> None:
            take(request, asked_at)
            self._backlog.add(-1, -num_prefill_tokens)

        self._backlog.add(1, num_prefill_tokens)
        self._steps.post(apply)

    def _main(self) -> None:
        """Run on the thread: load, step, report the end."""
        try:
            self._serve()
        finally:
            self._report(self._left.set_result, None)

    def _serve(self) -> None:
        try:
            spec = self._runner.load(self._allocate)
            self._limits = Limits.of(spec)
            self._scheduler = Scheduler(self._limits)
            self._steps = StepLoop(self._runner, self._scheduler, self._outbox)
        except BaseException as error:
            self._report(self._loaded.set_exception, error)
            return
        self._report(self._loaded.set_result, spec)
        try:
            self._steps.run()
        except BaseException as error:
            self._report(self._end, error)
        else:
            self._report(self._end, None)
        finally:
            self._runner.close()

    def _report(self, tell: Callable[[T], object], value: T) -> None:
        # The loop may be gone when a step outlived the process's patience; then nobody is left to be told.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell, value)

    def _end(self, cause: BaseException | None) -> None:
        """Settle `join` (loop's thread); with a cause the engine has died of it."""
        self._steps.stop()
        self._outbox.close()
        if self._ended.done():
            return
        if cause is None:
            self._ended.set_result(None)
        else:
            error = EngineError(f"the engine's loop died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._ended.set_exception(error)


def on_monotonic_clock(request: GenerateRequest) -> GenerateRequest:
    """Return the request with its deadlines on the clock that the engine steps by, from Unix time: what the wall clock
    does afterwards neither ends a request nor falsifies its times."""
    deadlines = request.deadlines
    if deadlines == NO_DEADLINES:
        return request
    ahead_s = time.time() - time.monotonic()

    def moved(at: float | None) -> float | None:
        return None if at is None else at - ahead_s

    deadlines = Deadlines(
        queue=moved(deadlines.queue),
        prefill=moved(deadlines.prefill),
        transfer=moved(deadlines.transfer),
        first_token=moved(deadlines.first_token),
        total=moved(deadlines.total),
        inter_token_s=deadlines.inter_token_s,
    )
    return structs.replace(request, deadlines=deadlines)
