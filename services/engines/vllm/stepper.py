"""A turn of the engine core: what goes in, what a step made of it, whose KV it still holds. Engine's thread only."""

import time
from typing import Any

import msgspec

from schemas.errors import RequestError
from services.engines.adapter.faults import output_fault
from services.engines.vllm.own_metrics import OwnMetrics
from services.engines.vllm.prefix_cache import PrefixCacheView
from services.engines.vllm.sources import Source, poisoned_blocks, shares
from services.engines.vllm.translate import from_core, note_events, to_core
from services.engines.vllm.words import CoreGauges, CoreOutput, CoreRequest, PrefillPass, StepReport


class _Running(msgspec.Struct, kw_only=True):
    """A request in the core; `events` are the times of its queueing and scheduling."""

    num_logprobs: int | None
    events: dict[str, float]


class Stepper:
    """Feeds and steps one EngineCore."""

    def __init__(self, core: Any, cache: PrefixCacheView, metrics: OwnMetrics) -> None:
        self._core = core
        self._cache = cache
        self._metrics = metrics
        self._running: dict[str, _Running] = {}
        self._unproven: dict[str, Source] = {}
        self._delayed: set[str] = set()
        self._releasing: set[str] = set()
        self._own_outputs: list[CoreOutput] = []
        self._last_gauges = CoreGauges()

    def has_work(self) -> bool:
        """Whether a step would do anything: look at transfers at least."""
        core = self._core
        return bool(self._own_outputs or core.scheduler.has_requests() or core.batch_queue or self._cache.has_news())

    def is_computing(self) -> bool:
        """Whether a request waits for tokens, not only for transfers."""
        return bool(self._core.scheduler.running)

    def submit(self, request: CoreRequest) -> None:
        """Begin a request; if vLLM refuses it, that is its output."""
        try:
            vllm_request, wave = self._core.preprocess_add_request(to_core(request))
        except Exception as error:  # whatever vLLM has against one request is no reason to end the others
            refusal = RequestError(f"vLLM refuses the request: {error}")
            self._own_outputs.append(CoreOutput(id=request.id, finish="error", error=refusal))
            return
        num_logprobs = request.sampling.get("logprobs")
        self._running[request.id] = _Running(num_logprobs=num_logprobs, events={})  # type: ignore[arg-type]
        if request.is_unproven:
            self._unproven[request.id] = Source(vllm_request=vllm_request)
        self._core.add_request(vllm_request, wave)
        self._metrics.submitted(
            request.id, num_prompt_tokens=len(request.token_ids), max_tokens=vllm_request.max_tokens
        )

    def abort(self, core_id: str) -> None:
        """End a request, in whatever state; no output follows. Fetched KV that nobody vouched for yet goes with it."""
        if core_id in self._unproven:
            self.disown(core_id)
        self._end(core_id)

    def release(self, core_id: str) -> None:
        """Free the blocks that a finished request keeps for a peer, in the next step."""
        self._releasing.add(core_id)

    def proven(self, core_id: str) -> None:
        """The KV that this request fetched was good."""
        self._unproven.pop(core_id, None)

    def disown(self, core_id: str) -> None:
        """End a request whose fetched KV may be another's, drop that KV from the prefix cache, and end every request
        that shares it as `poisoned`."""
        source = self._unproven.pop(core_id, None)
        if source is None:
            return
        scheduler = self._core.scheduler
        poisoned = poisoned_blocks(scheduler, source, core_id)
        scheduler.kv_cache_manager.evict_blocks(poisoned)
        self._end(core_id)
        for other in [one for one in self._running if shares(scheduler, one, poisoned)]:
            self._unproven.pop(other, None)
            self._end(other)
            self._own_outputs.append(CoreOutput(id=other, finish="poisoned"))

    def step(self) -> StepReport | None:
        """Step the core; return None when nothing has happened."""
        self._expire_released()
        began = time.monotonic()
        raw, executed = self._core.step_fn()
        seconds = time.monotonic() - began
        self._core.post_step(model_executed=executed)
        made = (raw or {}).get(0)
        if made is not None:
            self._metrics.note(made)
        outputs = [self._translated(one) for one in made.outputs] if made is not None else []
        own, self._own_outputs = self._own_outputs, []
        stats = made.scheduler_stats if made is not None else None
        connector = (stats.kv_connector_stats if stats is not None else None) or {}
        freed, gauges, cache_changes = self._freed(), self._gauges(), self._cache.changes()
        if not (outputs or own or freed or connector or cache_changes or gauges != self._last_gauges):
            return None
        self._last_gauges = gauges
        return StepReport(
            outputs=(*own, *outputs),
            freed=freed,
            num_expired=len(_series(connector, "num_kv_expired_reqs")),
            num_bytes=int(sum(_series(connector, "bytes_transferred"))),
            gauges=gauges,
            cache_changes=cache_changes,
            prefill_pass=self._prefill_pass(stats, seconds),
        )

    def shutdown(self) -> None:
        """Let go of the model, the KV and the connector."""
        self._core.shutdown()

    def _end(self, core_id: str) -> None:
        self._running.pop(core_id, None)
        self._metrics.left(core_id)
        self._core.abort_requests([core_id])
        if core_id in self._core.scheduler.requests:
            self._delayed.add(core_id)

    def _translated(self, output: Any) -> CoreOutput:
        running = self._running.get(output.request_id)
        events = running.events if running is not None else {}
        note_events(output, events)
        source = self._unproven.get(output.request_id)
        if source is not None:
            source.note(output)
            if str(output.finish_reason) in ("abort", "error"):  # nobody will ask what became of its KV
                self.disown(output.request_id)
        if output.finish_reason is not None:
            self._running.pop(output.request_id, None)
            if output.request_id in self._core.scheduler.requests:
                self._delayed.add(output.request_id)
        try:
            return from_core(output, running.num_logprobs if running is not None else None, events)
        except Exception as error:  # what can't be read is no reason to end the others
            self.abort(output.request_id)
            self.release(output.request_id)
            fault = output_fault("vLLM", output.request_id, error)
            return CoreOutput(id=output.request_id, finish="error", error=fault)

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

    def _prefill_pass(self, stats: Any, seconds: float) -> PrefillPass | None:
        """Return the step as a pass, if it was one of prompts alone. The core times only its wait for the result: that
        is the whole step where batches overlap (a batch queue), and next to nothing where they don't."""
        details = stats.iteration_details if stats is not None else None
        if details is None or not details.num_ctx_tokens or details.num_generation_requests:
            return None
        overlapping_s = details.elapsed_ms / 1000 if self._core.batch_queue is not None else seconds
        return PrefillPass(details.num_ctx_tokens, overlapping_s)

    def _gauges(self) -> CoreGauges:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        num_idle = self._cache.num_idle(time.monotonic())
        return CoreGauges(blocks_used=used, blocks_cached=num_idle, num_delayed=len(self._delayed))


def expire_leases(worker: Any, core_ids: list[str]) -> None:
    """Set, in a vLLM worker, the leases of these requests to have run out (nixl/base_worker.py@0.32.0,
    _reap_expired_send_leases). Other connectors than NIXL's keep their own time."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    inner = getattr(get_kv_transfer_group(), "connector_worker", None)
    leases = getattr(inner, "_reqs_to_send", {})
    for core_id in core_ids:
        if core_id in leases:
            leases[core_id] = 0.0


def _series(connector_stats: dict[str, Any], name: str) -> list[float]:
    values = connector_stats.get("data", connector_stats).get(name, [])
    return values if isinstance(values, list) else []
