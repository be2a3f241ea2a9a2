"""What one decode leg counts and times, for its first token and its last frame."""

import time

from schemas.frames import Timings, Usage
from schemas.hop import DecodeRequest
from services.engines.vllm.words import CoreOutput, PromptStats

_NOTHING = PromptStats(computed=0, local_cache=0, external=0, queue_s=0.0, prefill_s=0.0)


class Tally:
    """`params` are vLLM's, of a leg that fetches its KV; None: it computes its prompt."""

    def __init__(self, leg: DecodeRequest, params: dict[str, object] | None) -> None:
        self.prompt: PromptStats | None = None
        self._leg = leg
        self._params = params
        self._first_token_at = 0.0

    def note_first(self, output: CoreOutput) -> PromptStats:
        """The first token is here: return where its prompt's KV came from."""
        self._first_token_at = time.monotonic()
        self.prompt = output.prompt or _NOTHING
        return self.prompt

    @property
    def cached_tokens(self) -> int:
        """The prompt's prefix hit, where it was computed; to the engine resumed ids are part of the prompt, here they
        aren't."""
        local = (self.prompt or _NOTHING).local_cache
        hit = local if self._params is None else self._params.get("remote_prefill_cached_tokens")
        return min(hit, len(self._leg.request.token_ids)) if isinstance(hit, int) else 0

    def usage(self, num_tokens: int) -> Usage:
        """Return the counts of a completion of `num_tokens`, resumed ones included."""
        prompt, num_prompt = self.prompt or _NOTHING, len(self._leg.request.token_ids)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_tokens,
            cached_tokens=self.cached_tokens,
            num_computed_prompt_tokens=min(prompt.computed, num_prompt),
        )

    def timings(self, kv_bytes_per_token: int) -> Timings:
        """Return the phases. vLLM schedules a request when its KV is there: what it waited until then was transfer."""
        prompt, decode_s = self.prompt or _NOTHING, time.monotonic() - self._first_token_at
        if self._params is None:
            return Timings(prefill_queue_s=prompt.queue_s, prefill_s=prompt.prefill_s, decode_s=decode_s)
        kv_bytes = prompt.external * kv_bytes_per_token
        return Timings(transfer_s=prompt.queue_s, decode_s=decode_s, kv_bytes=kv_bytes)
