"""The decode leg: fetch the KV by vLLM's own connector, let prefill vouch for it, then deliver.

vLLM draws the first token here again, from the same KV: it runs the last prompt token once more, so ids and seeds give
what one engine alone would. Prefill's draw has only shown that the request goes on.
"""

from schemas.errors import BuswayError, EngineError, KvTransferFailedError, error_from
from schemas.frames import Failed, Finished, FinishReason
from schemas.hop import DecodeRequest
from schemas.peer import Verdict
from services.engines.adapter.frames import CompletionFrames
from services.engines.prompt import num_prompt_tokens, prompt_ids
from services.engines.protocol import EngineEvent
from services.engines.vllm.sampling import sampling_values
from services.engines.vllm.site import Site
from services.engines.vllm.tally import Tally
from services.engines.vllm.vouching import Params, Voucher, source_of
from services.engines.vllm.words import CoreOutput, CoreRequest, Finish, fresh_core_id


class DecodeLeg:
    """One decode leg. With `params` its events are withheld until prefill has said that the KV was held throughout."""

    def __init__(self, site: Site, leg: DecodeRequest) -> None:
        self.attempt_id = leg.request.attempt_id
        self._site = site
        self._leg = leg
        self._request = leg.request
        source = source_of(leg)
        self._voucher = Voucher(site.link, leg.request.attempt_id, source[0]) if source is not None else None
        self._params: Params | None = source[1] if source is not None else None
        self._tally = Tally(leg, self._params)
        self._core_id = ""
        self._frames = CompletionFrames(leg.request)
        self._withheld: list[EngineEvent] | None = None

    def start(self) -> None:
        """Submit it, with params once prefill has said that it still holds the KV."""
        if self._voucher is None:
            self._submit()
        else:
            self._site.legs[self.attempt_id] = self
            self._withheld = []
            self._site.spawn(self._fetch(self._voucher), f"fetch {self.attempt_id}")

    def take(self, output: CoreOutput) -> None:
        """See Leg."""
        if output.finish == "poisoned":
            self._kv_is_bad(KvTransferFailedError("the KV it shared with another request was not good"))
        elif output.finish in ("abort", "error"):
            self._end([self._failed(output.error or self._engine_error(output.finish))])
        else:
            is_first = self._tally.prompt is None and bool(output.token_ids)
            events: list[EngineEvent] = []
            if is_first:
                self._note_first(output)
                timings = self._tally.timings(self._site.spec.kv_bytes_per_token)
                events.append(self._frames.begun(timings, self._tally.cached_tokens))
            self._deliver(events + self._tokens(output))
            if output.finish is not None:
                self._deliver([self._finished(output.finish)])
            if is_first and self._withheld is not None and self._voucher is not None:
                self._site.spawn(self._confirm(self._voucher), f"confirm {self.attempt_id}")

    def abort(self, error: BuswayError | None) -> None:
        """See Leg."""
        if not self._core_id and self._params is not None:
            self._submit()  # aborted at its start, vLLM tells prefill that the KV will not be fetched
        self._leave()
        self._site.core.abort(self._core_id)
        if error is not None:
            self._site.ticks.add([self._failed(error)])

    def is_running(self) -> bool:
        """See Leg."""
        return self._tally.prompt is not None

    def num_queued_tokens(self) -> int:
        """See Leg."""
        is_computed_here = self._tally.prompt is None and self._params is None
        return num_prompt_tokens(self._request) if is_computed_here else 0

    async def _fetch(self, voucher: Voucher) -> None:
        verdict = await voucher.is_held(self._site.spec.lease_s)
        if not self._is_here():
            return
        if verdict.is_good:
            self._submit()
        else:
            self._kv_is_bad(_reason(verdict))

    async def _confirm(self, voucher: Voucher) -> None:
        """Deliver what was withheld once prefill vouches for the KV; otherwise nothing made from it is ever seen."""
        site, core_id = self._site, self._core_id
        verdict = await voucher.was_held()
        if verdict.is_good:
            site.core.proven(core_id)
        else:
            site.core.disown(core_id)
        if not self._is_here() or self._core_id != core_id:
            return
        if verdict.is_good:
            site.totals.num_remote_prefills += 1
            events, self._withheld = self._withheld or [], None
            self._deliver(events)
        else:
            self._kv_is_bad(_reason(verdict))

    def _kv_is_bad(self, why: BuswayError) -> None:
        """Compute the prompt here, or fail, as configured. Tokens that were delivered already can't be taken back."""
        site = self._site
        site.by_core_id.pop(self._core_id, None)
        if site.policy == "fail" or self._delivered().num_tokens > len(self._request.resume):
            self._end([self._failed(why)])
            return
        site.totals.num_recomputed_tokens += num_prompt_tokens(self._request)
        self._withheld, self._params = None, None
        self._tally, self._frames = Tally(self._leg, None), CompletionFrames(self._request)
        self._submit()

    def _submit(self) -> None:
        request, site = self._request, self._site
        self._core_id = fresh_core_id(request.attempt_id)
        site.enter(request.attempt_id, self._core_id, self)
        site.core.submit(
            CoreRequest(
                id=self._core_id,
                token_ids=prompt_ids(request),
                sampling=sampling_values(request, site.limits, "decode"),
                cache_salt=request.cache_salt,
                priority=-request.priority,
                kv_transfer_params=self._params,
                is_unproven=self._params is not None,
            )
        )

    def _note_first(self, output: CoreOutput) -> None:
        prompt, totals = self._tally.note_first(output), self._site.totals
        totals.num_prompt_tokens += num_prompt_tokens(self._request)
        totals.num_cached_tokens += prompt.local_cache
        if self._params is not None:  # vLLM computes what its connector failed to load
            totals.num_recomputed_tokens += prompt.computed

    def _tokens(self, output: CoreOutput) -> list[EngineEvent]:
        if not output.token_ids:
            return []
        self._site.totals.num_generated_tokens += len(output.token_ids)
        return [self._frames.tokens(output.token_ids, output.logprobs)]

    def _finished(self, finish: Finish) -> Finished:
        frames, tally = self._frames, self._tally
        reason: FinishReason = "length" if finish == "length" else "stop"
        timings = tally.timings(self._site.spec.kv_bytes_per_token)
        return frames.finished(reason, tally.usage(frames.num_tokens), timings)

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
        self._site.leave(self.attempt_id, self._core_id)

    def _is_here(self) -> bool:
        return self._site.legs.get(self.attempt_id) is self

    def _delivered(self) -> CompletionFrames:
        return self._frames if self._withheld is None else CompletionFrames(self._request)

    def _failed(self, error: BuswayError) -> Failed:
        return self._delivered().failed(error)

    def _engine_error(self, finish: str) -> BuswayError:
        if self._params is not None and self._tally.prompt is None:
            return KvTransferFailedError("vLLM's connector could not load the KV")
        return EngineError(f"vLLM ended the request with {finish}")


def _reason(verdict: Verdict) -> BuswayError:
    return error_from(verdict.error) if verdict.error is not None else KvTransferFailedError("prefill knows no such KV")
