"""The generation phase: a decode leg, with KV from a context phase or all by itself."""

import logging
import time

from schemas.errors import BuswayError, EngineError, KvTransferFailedError, RequestError, WorkerLostError
from schemas.frames import Finished, FinishReason, Timings, Usage
from schemas.handoff import TrtllmDisaggregatedParams
from schemas.hop import DecodeRequest
from schemas.ids import Epoch, WorkerId
from schemas.peer import ConfirmRequest, Verdict
from schemas.request import GenerateRequest
from services.engines.adapter.frames import CompletionFrames, usage_of
from services.engines.prompt import num_prompt_tokens
from services.engines.protocol import EngineEvent
from services.engines.trtllm.api import RequestOutput
from services.engines.trtllm.leg import Leg, completion_of
from services.engines.trtllm.params import first_row, from_wire, generation_params
from services.engines.trtllm.site import Site

logger = logging.getLogger(__name__)


class GenerationLeg(Leg):
    """A decode leg: with `params` its KV comes from a context phase, without it computes the prompt (aggregated).

    generation_only emits the context's token once more, as its first [X]: here it is delivered, and counted.
    """

    def __init__(
        self, site: Site, leg: DecodeRequest, params: TrtllmDisaggregatedParams | None, *, is_recompute: bool = False
    ) -> None:
        super().__init__(site, leg.request)
        self._leg = leg
        self._params = params
        self._wire = None if params is None else from_wire(params.disaggregated_params)
        row = None if self._wire is None else first_row(site.engine.api, self._wire)
        self._completion = completion_of(site, leg.request, row)
        self._frames = CompletionFrames(leg.request)
        self._is_recompute = is_recompute
        self._first_result_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return super().num_tokens + self._completion.num_tokens

    @property
    def num_queued_tokens(self) -> int:
        is_computing = self._wire is None and self._first_result_at is None
        return num_prompt_tokens(self.request) if is_computing else 0

    @property
    def may_abort(self) -> bool:
        return self._wire is None or self._first_result_at is not None

    @property
    def awaits(self) -> tuple[WorkerId, Epoch] | None:
        """The prefill worker whose KV hasn't come yet."""
        if self._params is None or self._first_result_at is not None:
            return None
        return self._params.prefill_worker, self._params.epoch

    def submit(self) -> RequestOutput:
        engine, wire = self.site.engine, self._wire
        sampling = engine.sampling(self.request)
        params = None if wire is None else generation_params(engine.api, wire)
        if wire is not None:
            self.site.used.take(wire)
        return engine.submit(self.request, sampling, streaming=True, params=params)

    def failed(self, error: BuswayError) -> EngineEvent:
        return self._frames.failed(error)

    def refused(self, error: str) -> None:
        if self._wire is None or self._first_result_at is not None:
            super().refused(error)
        else:
            self.lose_kv(KvTransferFailedError(f"TensorRT-LLM couldn't get the KV: {error}", phase="transfer"))

    def lose_kv(self, error: BuswayError) -> None:
        """The KV won't come: compute the prompt here, or fail, as configured. What is under way drains."""
        if self.is_muted:
            return
        if not self.site.recomputes:
            self.close(self.failed(error))
            return
        self.close()
        logger.info("the KV of %s is lost, computing its prompt here: %s", self.request.attempt_id, error.message)
        again = GenerationLeg(self.site, self._leg, None, is_recompute=True)
        try:
            again.start()
        except (RequestError, EngineError) as refusal:
            self.site.ticks.add([self.failed(refusal)])

    def landed(self, output: RequestOutput) -> None:
        if self._first_result_at is not None:
            return
        self._first_result_at = time.monotonic()
        if self._params is None:
            self._count_prompt(output)
        else:
            self.site.totals.num_remote_prefills += 1
            self.site.spawn(_fetched(self.site, self.request, self._params), "trtllm-fetched")

    def take(self, output: RequestOutput) -> None:
        if len(output.outputs) != 1:
            raise EngineError(f"TensorRT-LLM answered with {len(output.outputs)} choices instead of one")
        is_first = not self._completion.num_tokens
        step = self._completion.take(output.outputs[0], is_final=output.finished)
        self.site.totals.num_generated_tokens += len(step.token_ids)
        events: list[EngineEvent] = []
        if step.token_ids:
            if is_first:
                events.append(self._frames.begun(self._timings(), self._usage(output).cached_tokens))
            events.append(self._frames.tokens(step.token_ids, step.logprobs))
        self.site.ticks.add(events)
        if step.reason is not None:
            self.close(self._finished(output, step.reason))

    def _count_prompt(self, output: RequestOutput) -> None:
        totals, num_prompt = self.site.totals, num_prompt_tokens(self.request)
        totals.num_prompt_tokens += num_prompt
        totals.num_cached_tokens += output.cached_tokens
        if self._is_recompute:
            totals.num_recomputed_tokens += num_prompt - output.cached_tokens

    def _finished(self, output: RequestOutput, reason: FinishReason) -> Finished:
        params = self._params
        kv_bytes = 0 if params is None else _kv_bytes(output)
        self.site.totals.num_transfer_bytes += kv_bytes
        return self._frames.finished(reason, self._usage(output), self._timings(kv_bytes))

    def _usage(self, output: RequestOutput) -> Usage:
        params = self._params
        num_cached = output.cached_tokens if params is None else params.num_cached_tokens
        return usage_of(self.request, self._frames.num_tokens, num_cached, is_remote=params is not None)

    def _timings(self, kv_bytes: int = 0) -> Timings:
        """Return the phases up to now; TensorRT-LLM tells of none, so all until its first result is one."""
        assert self._first_result_at is not None
        first_s, decode_s = self._first_result_at - self.started, time.monotonic() - self._first_result_at
        if self._params is None:
            return Timings(prefill_s=first_s, decode_s=decode_s)
        return Timings(transfer_s=first_s, decode_s=decode_s, kv_bytes=kv_bytes)


async def _fetched(site: Site, request: GenerateRequest, params: TrtllmDisaggregatedParams) -> None:
    """Tell the prefill worker that its KV is here; unheard, it counts it as held until the engine's time-out."""
    if not params.prefill_worker:
        return
    message = ConfirmRequest(attempt_id=request.attempt_id, epoch=params.epoch)
    try:
        await site.link.ask(params.prefill_worker, message, Verdict)
    except BuswayError as error:
        logger.debug("%s didn't hear that its KV was fetched: %s", params.prefill_worker, error.message)


def _kv_bytes(output: RequestOutput) -> int:
    """Return how many bytes of KV came for the request, as the engine's own metrics have it; 0 where it has none."""
    metrics = output.outputs[0].request_perf_metrics
    return 0 if metrics is None else int(metrics.timing_metrics.kv_cache_size)


def worker_lost(worker: WorkerId) -> BuswayError:
    """Return the error of a leg whose prefill worker is gone before its KV has come."""
    return WorkerLostError(f"prefill worker {worker} is gone before its KV was fetched", phase="transfer")


def resumed_end(request: GenerateRequest, stop_ids: frozenset[int]) -> Finished:
    """Return the end of a request whose resumed ids ended it already."""
    reason: FinishReason = "stop" if request.resume[-1] in stop_ids else "length"
    usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=len(request.resume))
    return Finished(request.attempt_id, len(request.resume), reason, usage)
