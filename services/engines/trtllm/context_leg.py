"""The context phase: a prefill leg. Its one result says whether the prompt's KV waits for a generation phase."""

import time

from schemas.errors import BuswayError, EngineError
from schemas.frames import Timings
from schemas.handoff import TrtllmDisaggregatedParams
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed, PrefillRequest
from services.engines.protocol import EngineEvent
from services.engines.trtllm.api import CompletionOutput, RequestOutput
from services.engines.trtllm.completion import bad_end
from services.engines.trtllm.leg import Leg, completion_of
from services.engines.trtllm.params import context_params, to_wire
from services.engines.trtllm.site import Site, now_s

# The context phase's KV waits for a generation phase only after these [V: _GEN_PENDING_FINISH_REASONS].
ARMED = frozenset({"length", "not_finished"})


class ContextLeg(Leg):
    """A prefill leg: one result. Whether the prompt's KV then waits to be fetched is the engine's to say.

    The request's own EOS, stop ids and min_tokens go along: a first token that is EOS finishes the engine's request
    as `stop`, and no handoff is set up. But the sampler looks at length before stop ids [XS], and a context phase has
    max_tokens 1: a first token that is a *stop id* ends as `length`, its KV waits, and only a generation phase
    can free it. So that one is handed over like any other, and decode ends it. A request for one token has no
    generation phase in any case: it runs without disaggregated params and leaves nothing behind.
    """

    def __init__(self, site: Site, leg: PrefillRequest) -> None:
        super().__init__(site, leg.request)
        stop = leg.request.stop
        self._is_whole = stop.max_tokens - len(leg.request.resume) <= 1
        made = site.ids.next(time.time())
        self._params = None if self._is_whole else context_params(site.engine.api, made)

    @property
    def num_queued_tokens(self) -> int:
        return self.num_tokens

    def submit(self) -> RequestOutput:
        sampling = self.site.engine.sampling(self.request, max_tokens=1)
        return self.site.engine.submit(self.request, sampling, streaming=False, params=self._params)

    def failed(self, error: BuswayError) -> EngineEvent:
        return PrefillFailed(attempt_id=self.request.attempt_id, error=error.record())

    def take(self, output: RequestOutput) -> None:
        if not output.finished or len(output.outputs) != 1:
            raise EngineError("TensorRT-LLM's context phase didn't answer with exactly one response")
        totals, (result,) = self.site.totals, output.outputs
        totals.num_prompt_tokens += self.num_tokens
        totals.num_cached_tokens += output.cached_tokens
        totals.num_generated_tokens += 1
        timings = Timings(prefill_s=time.monotonic() - self.started)
        if self._is_whole or result.finish_reason == "stop":
            self.close(self._ended(output, result, timings))
        elif result.finish_reason in ARMED:
            self.close(self._done(output, result, timings))
        else:
            raise bad_end(result.finish_reason)

    def landed(self, output: RequestOutput) -> None:
        """An aborted context phase may still have come to its end: its KV waits all the same."""
        result = output.outputs[0]
        if not self._is_whole and output.finished and result.finish_reason in ARMED:
            self.site.held.hold(self.request.attempt_id, self.site.book.num_blocks_for(self.num_tokens), now_s())

    def _ended(self, output: RequestOutput, result: CompletionOutput, timings: Timings) -> PrefillEnded:
        step = completion_of(self.site, self.request).take(result, is_final=True)
        if len(step.token_ids) != 1 or step.reason is None:
            raise EngineError(f"TensorRT-LLM's context phase ended with {len(step.token_ids)} tokens")
        return PrefillEnded(
            attempt_id=self.request.attempt_id,
            token_id=step.token_ids[0],
            reason=step.reason,
            num_cached_tokens=output.cached_tokens,
            logprobs=None if step.logprobs is None else step.logprobs[0],
            timings=timings,
        )

    def _done(self, output: RequestOutput, result: CompletionOutput, timings: Timings) -> PrefillDone:
        if result.disaggregated_params is None:
            raise EngineError("TensorRT-LLM's context phase gave no disaggregated params")
        row = result.logprobs[0] if result.logprobs else None
        params = TrtllmDisaggregatedParams(
            disaggregated_params=to_wire(result.disaggregated_params, self._params, row),
            num_tokens=self.num_tokens,
            num_cached_tokens=output.cached_tokens,
            prefill_worker=self.site.worker,
            epoch=self.site.epoch,
        )
        return PrefillDone(attempt_id=self.request.attempt_id, params=params, timings=timings)
