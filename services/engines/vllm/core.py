"""vLLM's engine core on a thread of its own: commands in, one report a step out. Knows nothing of attempts.

The core is stepped as long as it has anything to do. That includes finished requests whose blocks wait for a peer:
vLLM looks at its transfers' completions, heartbeats and leases only within a step.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from schemas.errors import EngineError, RequestError
from services.engines.vllm.launch import start_core
from services.engines.vllm.translate import from_core, note_events, to_core
from services.engines.vllm.words import CoreGauges, CoreOutput, CoreRequest, CoreSpec, LaunchOptions, StepReport

MIN_IDLE_S, MAX_IDLE_S = 0.001, 0.008  # between steps that only look at transfers: each costs a millisecond or two
STOP_S = 5.0

OnStep = Callable[[StepReport], None]


class _Running(msgspec.Struct, kw_only=True):
    """A request in the core; `events` are the times of its queueing and scheduling."""

    num_logprobs: int | None
    events: dict[str, float]


class CoreThread:
    """Owns an EngineCore. Methods are called on the event loop's thread and return at once."""

    def __init__(self, options: LaunchOptions) -> None:
        self.progress = 0
        self._options = options
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._core: Any = None
        self._running: dict[str, _Running] = {}
        self._unproven: dict[str, Any] = {}
        self._delayed: set[str] = set()
        self._releasing: set[str] = set()
        self._refused: list[CoreOutput] = []
        self._last_gauges = CoreGauges()
        self._idle_s = MIN_IDLE_S
        self._is_stopping = False
        self._has_died: asyncio.Future[None] | None = None

    async def start(self, on_step: OnStep) -> CoreSpec:
        """Start the thread and return once the model is warm. `on_step` gets each step's report on this loop."""
        loop = asyncio.get_running_loop()
        spec: asyncio.Future[CoreSpec] = loop.create_future()
        died = self._has_died = loop.create_future()

        def deliver(report: StepReport) -> None:
            loop.call_soon_threadsafe(on_step, report)

        def run() -> None:
            try:
                self._core, found = start_core(self._options)
                loop.call_soon_threadsafe(_settle, spec, found, None)
                self._serve(deliver)
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, spec, None, error)
                loop.call_soon_threadsafe(_settle, died, None, error)
            else:
                self._core.shutdown()
                loop.call_soon_threadsafe(_settle, died, None, None)

        threading.Thread(target=run, name="vllm-core", daemon=True).start()
        return await spec

    async def join(self) -> None:
        """Return when the thread has ended; raises what ended it."""
        assert self._has_died is not None
        try:
            await asyncio.shield(self._has_died)
        except Exception as error:
            raise EngineError(f"vLLM's engine core died: {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        """End the thread after the step under way; waits for it, but not for ever."""
        self._is_stopping = True
        self._commands.put(lambda: None)
        if self._has_died is not None:
            done, _ = await asyncio.wait([self._has_died], timeout=STOP_S)
            for died in done:
                died.exception()  # `start` or `join` has raised it

    def submit(self, request: CoreRequest) -> None:
        """Begin a request; if the core refuses it, that is its output."""
        self._commands.put(lambda: self._submit(request))

    def abort(self, core_id: str) -> None:
        """End a request, in whatever state; no output follows. A peer's blocks it has not fetched are given back."""
        self._commands.put(lambda: self._abort(core_id))

    def release(self, core_id: str) -> None:
        """Free the blocks that a finished request keeps for a peer, now."""
        self._commands.put(lambda: self._releasing.add(core_id))

    def proven(self, core_id: str) -> None:
        """The KV that this request fetched was good."""
        self._commands.put(lambda: self._forget_source(core_id))

    def disown(self, core_id: str) -> None:
        """The KV that this request fetched may be another's: end it, drop the KV from the prefix cache, and report
        every request that shares it as `poisoned`."""
        self._commands.put(lambda: self._disown(core_id))

    def _serve(self, deliver: OnStep) -> None:
        while True:
            self._obey()
            if self._is_stopping:
                return
            if self._refused or self._has_work():
                report = self._step()
                self.progress += 1
                self._idle_s = MIN_IDLE_S if report is not None else min(2 * self._idle_s, MAX_IDLE_S)
                if report is not None:
                    deliver(report)

    def _obey(self) -> None:
        """Carry out what was ordered; wait for an order while there is nothing to step."""
        command = self._next_command()
        while command is not None:
            command()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return

    def _next_command(self) -> Callable[[], None] | None:
        try:
            if not self._has_work():
                return self._commands.get()
            if self._running and self._core.scheduler.running:
                return self._commands.get_nowait()
            return self._commands.get(timeout=self._idle_s)
        except queue.Empty:
            return None

    def _has_work(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _submit(self, request: CoreRequest) -> None:
        try:
            vllm_request, wave = self._core.preprocess_add_request(to_core(request))
        except ValueError as error:
            refusal = RequestError(f"vLLM refuses the request: {error}")
            self._refused.append(CoreOutput(id=request.id, finish="error", error=refusal))
            return
        num_logprobs = request.sampling.get("logprobs")
        self._running[request.id] = _Running(num_logprobs=num_logprobs, events={})  # type: ignore[arg-type]
        if request.is_unproven:
            self._unproven[request.id] = vllm_request
        self._core.add_request(vllm_request, wave)

    def _abort(self, core_id: str) -> None:
        self._running.pop(core_id, None)
        self._unproven.pop(core_id, None)
        self._core.abort_requests([core_id])
        if core_id in self._core.scheduler.requests:
            self._delayed.add(core_id)

    def _forget_source(self, core_id: str) -> None:
        self._unproven.pop(core_id, None)

    def _disown(self, core_id: str) -> None:
        scheduler, vllm_request = self._core.scheduler, self._unproven.pop(core_id, None)
        self._running.pop(core_id, None)
        if vllm_request is None:
            return
        poisoned = _cached_blocks(scheduler.kv_cache_manager, vllm_request)
        if core_id in scheduler.requests:
            poisoned |= _blocks_of(scheduler.kv_cache_manager, core_id)
        scheduler.kv_cache_manager.evict_blocks(poisoned)
        self._core.abort_requests([core_id])
        for other in list(self._running):
            if other in scheduler.requests and _blocks_of(scheduler.kv_cache_manager, other) & poisoned:
                self._abort(other)
                self._refused.append(CoreOutput(id=other, finish="poisoned"))

    def _step(self) -> StepReport | None:
        """Step the core; return None when nothing has happened."""
        self._expire_released()
        raw, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        all_outputs = (raw or {}).get(0)
        outputs = [self._translated(one) for one in all_outputs.outputs] if all_outputs is not None else []
        refused, self._refused = self._refused, []
        stats = all_outputs.scheduler_stats if all_outputs is not None else None
        connector = (stats.kv_connector_stats if stats is not None else None) or {}
        freed, gauges = self._freed(), self._gauges()
        if not (outputs or refused or freed or connector or gauges != self._last_gauges):
            return None
        self._last_gauges = gauges
        return StepReport(
            outputs=(*refused, *outputs),
            freed=freed,
            num_expired=len(_series(connector, "num_kv_expired_reqs")),
            num_bytes=int(sum(_series(connector, "bytes_transferred"))),
            gauges=gauges,
        )

    def _translated(self, output: Any) -> CoreOutput:
        running = self._running.get(output.request_id)
        events = running.events if running is not None else {}
        note_events(output, events)
        if output.finish_reason is not None:
            self._running.pop(output.request_id, None)
            if output.request_id in self._core.scheduler.requests:
                self._delayed.add(output.request_id)
        return from_core(output, running.num_logprobs if running is not None else None, events)

    def _freed(self) -> tuple[str, ...]:
        if not self._delayed:
            return ()
        freed = tuple(core_id for core_id in self._delayed if core_id not in self._core.scheduler.requests)
        self._delayed.difference_update(freed)
        self._releasing.difference_update(freed)
        return freed

    def _expire_released(self) -> None:
        """Let the worker side's next look find these leases over: it alone may let their blocks go."""
        self._releasing &= self._delayed
        if self._releasing:
            self._core.model_executor.collective_rpc(expire_leases, args=(sorted(self._releasing),))

    def _gauges(self) -> CoreGauges:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return CoreGauges(blocks_used=used, num_delayed=len(self._delayed))


def expire_leases(worker: Any, core_ids: list[str]) -> None:
    """Set, in a vLLM worker, the leases of these requests to have run out (nixl/base_worker.py@0.32.0,
    _reap_expired_send_leases). Other connectors than NIXL's keep their own time."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    inner = getattr(get_kv_transfer_group(), "connector_worker", None)
    leases = getattr(inner, "_reqs_to_send", {})
    for core_id in core_ids:
        if core_id in leases:
            leases[core_id] = 0.0


def _blocks_of(manager: Any, core_id: str) -> set[int]:
    return {block for group in manager.get_block_ids(core_id) for block in group}


def _cached_blocks(manager: Any, vllm_request: Any) -> set[int]:
    """Return the prefix cache's blocks that hold this request's prompt, also when it has ended."""
    pool = manager.block_pool
    groups = range(len(manager.kv_cache_config.kv_cache_groups))
    found = (pool.get_cached_block(block_hash, [group]) for block_hash in vllm_request.block_hashes for group in groups)
    return {block.block_id for blocks in found for block in blocks or ()}


def _series(connector_stats: dict[str, Any], name: str) -> list[float]:
    values = connector_stats.get("data", connector_stats).get(name, [])
    return values if isinstance(values, list) else []


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.set_exception(EngineError(f"vLLM ended with {type(error).__name__}: {error}"))
