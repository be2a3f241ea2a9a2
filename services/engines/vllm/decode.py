"""The decode leg: fetch the KV by vLLM's own connector, let prefill vouch for it, then deliver.

vLLM draws the first token here again, from the same KV: it recomputes the last prompt token, so ids and seeds give
what one engine alone would. Prefill's draw has only shown that the request goes on.
"""

import time

import msgspec

from schemas.errors import (
    AckTimeoutError,
    BuswayError,
    EngineError,
    KvMismatchError,
    KvTransferFailedError,
    RequestError,
    WorkerLostError,
    error_from,
)
from schemas.frames import Failed, Finished, Timings, Tokens, Usage
from schemas.handoff import VllmKvTransferParams
from schemas.hop import DecodeRequest
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict
from services.engines.protocol import EngineEvent
from services.engines.vllm.sampling import sampling_values
from services.engines.vllm.site import Site
from services.engines.vllm.words import CoreOutput, CoreRequest, PromptStats

ASK_S = 1.0
MAX_ASKS = 3

_NOBODY = VllmKvTransferParams(kv_transfer_params=msgspec.Raw(b"null"))


class DecodeLeg:
    """One decode leg; `params` None: the prompt is computed here.

    With params its events are withheld until prefill has said that the blocks were held throughout.
    """

    def __init__(self, site: Site, leg: DecodeRequest) -> None:
        self._site = site
        self._leg = leg
        self._request = leg.request
        self._source, self._params = _source_of(leg)
        self._runs = 0
        self._core_id = ""
        self._next_seq = len(leg.request.resume)
        self._withheld: list[EngineEvent] | None = None
        self._prompt: PromptStats | None = None
        self._first_token_at = 0.0

    def start(self) -> None:
        """Submit it, once prefill has said that it still holds the KV."""
        if self._params is None:
            self._submit(None)
        else:
            self._enter()
            self._withheld = []
            self._site.spawn(self._fetch(), f"fetch {self._request.attempt_id}")

    def take(self, output: CoreOutput) -> None:
        """See Leg."""
        if output.finish == "poisoned":
            self._kv_is_bad(KvTransferFailedError("the KV it shared with another request was not good"))
            return
        if output.finish in ("abort", "error") or output.error is not None:
            self._end([self._failed(output.error or self._engine_error(output))])
            return
        is_first = self._prompt is None and bool(output.token_ids)
        if is_first:
            self._note_first(output)
        self._deliver(self._events(output))
        if is_first and self._withheld is not None:
            self._site.spawn(self._confirm(), f"confirm {self._request.attempt_id}")

    def abort(self, error: BuswayError | None) -> None:
        """See Leg."""
        self._leave()
        if self._core_id:
            self._site.core.abort(self._core_id)
        elif self._params is not None:
            self._give_back()
        if error is not None:
            self._site.ticks.add([self._failed(error)])

    def is_running(self) -> bool:
        """See Leg."""
        return self._prompt is not None

    def num_queued_tokens(self) -> int:
        """See Leg."""
        is_here = self._prompt is None and self._params is None
        return len(self._request.token_ids) + len(self._request.resume) if is_here else 0

    async def _fetch(self) -> None:
        lease_s = self._site.spec.lease_s
        verdict = await self._ask(
            LeaseRequest(attempt_id=self._request.attempt_id, epoch=self._source.epoch, lease_s=lease_s)
        )
        if not self._is_here():
            return
        if verdict.is_good:
            self._submit(self._params)
        else:
            self._kv_is_bad(_reason(verdict))

    async def _confirm(self) -> None:
        """Deliver what was withheld once prefill vouches for the KV; otherwise nothing made from it is ever seen."""
        core_id = self._core_id
        verdict = await self._ask(ConfirmRequest(attempt_id=self._request.attempt_id, epoch=self._source.epoch))
        if self._core_id != core_id or not self._is_here():
            self._site.core.disown(core_id) if not verdict.is_good else self._site.core.proven(core_id)
            return
        if not verdict.is_good:
            self._site.core.disown(core_id)
            self._kv_is_bad(_reason(verdict))
            return
        self._site.core.proven(core_id)
        self._site.totals.num_remote_prefills += 1
        events, self._withheld = self._withheld or [], None
        self._deliver(events)

    async def _ask(self, message: LeaseRequest | ConfirmRequest) -> Verdict:
        """Return prefill's verdict; no answer is a bad one."""
        worker = self._source.prefill_worker
        why: BuswayError = WorkerLostError(f"prefill worker {worker} doesn't answer")
        for _ in range(MAX_ASKS):
            try:
                return await self._site.link.ask(worker, message, Verdict, timeout_s=ASK_S)
            except AckTimeoutError as error:
                why = error
            except BuswayError as error:
                return Verdict(is_good=False, error=error.record())
        return Verdict(is_good=False, error=why.record())

    def _kv_is_bad(self, why: BuswayError) -> None:
        """Compute the prompt here, or fail, as configured. Tokens that were delivered already can't be taken back."""
        if self._core_id:
            self._site.by_core_id.pop(self._core_id, None)
        if self._site.policy == "fail" or self._next_delivered() > len(self._request.resume):
            self._end([self._failed(why)])
            return
        self._site.totals.num_recomputed_tokens += len(self._request.token_ids) + len(self._request.resume)
        self._withheld, self._prompt, self._params = None, None, None
        self._next_seq = len(self._request.resume)
        self._submit(None)

    def _next_delivered(self) -> int:
        return len(self._request.resume) if self._withheld is not None else self._next_seq

    def _enter(self) -> None:
        self._site.legs[self._request.attempt_id] = self

    def _submit(self, params: dict[str, object] | None) -> None:
        request, site = self._request, self._site
        self._core_id = f"{request.attempt_id}-d{self._runs}"
        self._runs += 1
        site.enter(request.attempt_id, self._core_id, self)
        site.core.submit(
            CoreRequest(
                id=self._core_id,
                token_ids=[*request.token_ids, *request.resume],
                sampling=sampling_values(request, site.limits, "decode"),
                cache_salt=request.cache_salt,
                priority=-request.priority,
                kv_transfer_params=params,
                is_unproven=params is not None,
            )
        )

    def _give_back(self) -> None:
        """Let prefill free the KV that will not be fetched: vLLM says so by aborting a request at its start."""
        self._submit(self._params)
        self._leave()
        self._site.core.abort(self._core_id)

    def _note_first(self, output: CoreOutput) -> None:
        self._first_token_at = time.monotonic()
        prompt = self._prompt = output.prompt or PromptStats(
            computed=0, local_cache=0, external=0, queue_s=0.0, prefill_s=0.0
        )
        totals = self._site.totals
        totals.num_prompt_tokens += len(self._request.token_ids) + len(self._request.resume)
        totals.num_cached_tokens += prompt.local_cache
        if self._params is not None and prompt.computed > 1:  # vLLM recomputed what its connector failed to load
            totals.num_recomputed_tokens += prompt.computed

    def _events(self, output: CoreOutput) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        attempt_id = self._request.attempt_id
        if output.token_ids:
            events.append(Tokens(attempt_id, self._next_seq, output.token_ids, output.logprobs))
            self._next_seq += len(output.token_ids)
            self._site.totals.num_generated_tokens += len(output.token_ids)
        if output.finish is not None:
            reason = "length" if output.finish == "length" else "stop"
            events.append(Finished(attempt_id, self._next_seq, reason, self._usage(), self._timings()))  # type: ignore[arg-type]
        return events

    def _deliver(self, events: list[EngineEvent]) -> None:
        if self._withheld is not None:
            self._withheld += events
        elif events and isinstance(events[-1], Finished):
            self._end(events)
        else:
            self._site.ticks.add(events)

    def _end(self, events: list[EngineEvent]) -> None:
        self._leave()
        self._site.ticks.add(events)

    def _leave(self) -> None:
        self._site.leave(self._request.attempt_id, self._core_id)

    def _is_here(self) -> bool:
        return self._site.legs.get(self._request.attempt_id) is self

    def _failed(self, error: BuswayError) -> Failed:
        return Failed(self._request.attempt_id, self._next_delivered(), error.record())

    def _engine_error(self, output: CoreOutput) -> BuswayError:
        if self._params is not None and self._prompt is None:
            return KvTransferFailedError("vLLM's connector could not load the KV")
        return EngineError(f"vLLM ended the request with {output.finish}")

    def _usage(self) -> Usage:
        prompt = self._prompt
        assert prompt is not None
        prefill_hit = (self._params or {}).get("remote_prefill_cached_tokens")
        return Usage(
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self._next_seq,
            cached_tokens=prompt.local_cache if self._params is None else int(prefill_hit or 0),  # type: ignore[call-overload]
            num_computed_prompt_tokens=prompt.computed,
        )

    def _timings(self) -> Timings:
        prompt, before = self._prompt, self._leg.prefill_timings
        assert prompt is not None
        decode_s = time.monotonic() - self._first_token_at
        if self._params is None:
            return Timings(prefill_queue_s=prompt.queue_s, prefill_s=prompt.prefill_s, decode_s=decode_s)
        return msgspec.structs.replace(
            before,
            transfer_s=prompt.queue_s,  # vLLM schedules a request when its KV is there
            decode_s=decode_s,
            kv_bytes=prompt.external * self._site.spec.kv_bytes_per_token,
        )


def _source_of(leg: DecodeRequest) -> tuple[VllmKvTransferParams, dict[str, object] | None]:
    """Return who holds the KV and vLLM's params as they came; raises for another engine's, for a prompt of another
    length, and when nobody could vouch for the KV."""
    if leg.params is None:
        return _NOBODY, None
    if not isinstance(leg.params, VllmKvTransferParams):
        raise RequestError(f"vLLM can't use {type(leg.params).__name__}", param="params")
    params = msgspec.json.decode(leg.params.kv_transfer_params, type=dict[str, object] | None)
    if params is None:
        return _NOBODY, None
    if not leg.params.prefill_worker:
        raise RequestError("kv_transfer_params without the prefill worker they are from", param="params")
    num_tokens = len(leg.request.token_ids) + len(leg.request.resume)
    num_remote = params.get("remote_num_tokens", num_tokens)
    if num_remote != num_tokens:
        raise KvMismatchError(f"the KV is of a prompt of {num_remote} tokens, the request has {num_tokens}")
    return leg.params, params


def _reason(verdict: Verdict) -> BuswayError:
    return error_from(verdict.error) if verdict.error is not None else KvTransferFailedError("prefill knows no such KV")
