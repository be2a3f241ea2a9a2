"""The prefill leg: one token drawn to learn whether it ends the request, and the KV kept for decode under a lease."""

import time

import msgspec

from schemas.errors import BuswayError, EngineError
from schemas.frames import FinishReason, Timings
from schemas.handoff import VllmKvTransferParams
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed, PrefillRequest
from services.engines.prompt import num_prompt_tokens, prompt_ids
from services.engines.vllm.sampling import num_left, sampling_values
from services.engines.vllm.site import Site
from services.engines.vllm.words import CoreOutput, CoreRequest, fresh_core_id


class PrefillLeg:
    """One prefill leg. After its result the KV is the HeldTable's and this object is gone."""

    def __init__(self, site: Site, leg: PrefillRequest) -> None:
        self.attempt_id = leg.request.attempt_id
        self._site = site
        self._request = leg.request
        self._core_id = fresh_core_id(leg.request.attempt_id)

    def start(self) -> None:
        """Submit it. A request of one token is over after prefill: its KV is not kept."""
        request = self._request
        self._site.enter(request.attempt_id, self._core_id, self)
        self._site.core.submit(
            CoreRequest(
                id=self._core_id,
                token_ids=prompt_ids(request),
                sampling=sampling_values(request, self._site.limits, "prefill"),
                cache_salt=request.cache_salt,
                priority=-request.priority,
                kv_transfer_params={"do_remote_decode": True} if num_left(request) > 1 else None,
            )
        )

    def take(self, output: CoreOutput) -> None:
        """See Leg. The engine's one output for this leg is its last."""
        if output.finish is None:
            return
        site, attempt_id = self._site, self.attempt_id
        site.leave(attempt_id, self._core_id)
        if output.finish not in ("stop", "length") or not output.token_ids:
            why = output.error or EngineError(f"vLLM ended the prefill with {output.finish}")
            site.ticks.add([PrefillFailed(attempt_id=attempt_id, error=why.record())])
            return
        self._count(output)
        if output.finish == "stop" or num_left(self._request) == 1:
            if output.kv_transfer_params is not None:
                site.core.release(self._core_id)
            site.ticks.add([self._ended(output, "stop" if output.finish == "stop" else "length")])
        else:
            site.ticks.add([self._done(output)])

    def abort(self, error: BuswayError | None) -> None:
        """See Leg."""
        self._site.leave(self.attempt_id, self._core_id)
        self._site.core.abort(self._core_id)
        if error is not None:
            self._site.ticks.add([PrefillFailed(attempt_id=self.attempt_id, error=error.record())])

    def is_running(self) -> bool:
        """See Leg."""
        return False

    def num_queued_tokens(self) -> int:
        """See Leg."""
        return num_prompt_tokens(self._request)

    def _done(self, output: CoreOutput) -> PrefillDone | PrefillFailed:
        site, attempt_id, params = self._site, self.attempt_id, output.kv_transfer_params
        if params is not None:  # connectors that find the KV by themselves (shared storage) return none, and hold none
            site.held.grant(attempt_id, self._core_id, lease_s=site.spec.lease_s, granted_at=time.monotonic())
        elif site.spec.is_nixl:
            lost = EngineError(f"{site.spec.connector} returned no kv_transfer_params")
            return PrefillFailed(attempt_id=attempt_id, error=lost.record())
        whole = VllmKvTransferParams(
            kv_transfer_params=msgspec.Raw(msgspec.json.encode(params)), prefill_worker=site.worker, epoch=site.epoch
        )
        return PrefillDone(attempt_id=attempt_id, params=whole, timings=_timings(output))

    def _ended(self, output: CoreOutput, reason: FinishReason) -> PrefillEnded:
        return PrefillEnded(
            attempt_id=self.attempt_id,
            token_id=output.token_ids[0],
            reason=reason,
            num_cached_tokens=output.prompt.local_cache if output.prompt is not None else 0,
            logprobs=output.logprobs[0] if output.logprobs else None,
            timings=_timings(output),
        )

    def _count(self, output: CoreOutput) -> None:
        totals, prompt = self._site.totals, output.prompt
        totals.num_generated_tokens += 1
        if prompt is not None:
            totals.num_prompt_tokens += self.num_queued_tokens()
            totals.num_cached_tokens += prompt.local_cache


def _timings(output: CoreOutput) -> Timings:
    if output.prompt is None:
        return Timings()
    return Timings(prefill_queue_s=output.prompt.queue_s, prefill_s=output.prompt.prefill_s)
