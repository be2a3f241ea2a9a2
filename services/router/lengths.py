"""Whether a request's sequence fits a worker: judged as its engine will (services.engines.paged.limits), before anybody
is asked. Pure.

A resumed completion has more to prefill and no more to hold: what was delivered counts toward max_tokens.
"""

import msgspec

from schemas.request import GenerateRequest
from schemas.worker import RuntimeConfig


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A request in tokens. `num_resumed_tokens` are those of the completion that were delivered already."""

    num_prompt_tokens: int
    max_tokens: int
    num_resumed_tokens: int = 0

    @classmethod
    def of(cls, request: GenerateRequest) -> "Lengths":
        return cls(
            num_prompt_tokens=len(request.token_ids),
            max_tokens=request.stop.max_tokens,
            num_resumed_tokens=len(request.resume),
        )

    def fit_prefill(self, config: RuntimeConfig) -> bool:
        """Return whether the worker can compute the prompt: its pool needs to hold no more than that."""
        num_to_compute = self.num_prompt_tokens + self.num_resumed_tokens
        return self._fit_context(config) and _num_blocks(num_to_compute, config) <= config.total_kv_blocks

    def fit_decode(self, config: RuntimeConfig) -> bool:
        """Return whether the worker can hold the sequence to its end; the last token's KV is never computed."""
        num_to_hold = self.num_prompt_tokens + max(self.num_resumed_tokens, self.max_tokens - 1)
        return self._fit_context(config) and _num_blocks(num_to_hold, config) <= config.total_kv_blocks

    def _fit_context(self, config: RuntimeConfig) -> bool:
        return self.num_prompt_tokens + self.max_tokens <= config.max_context_tokens


def _num_blocks(num_tokens: int, config: RuntimeConfig) -> int:
    return -(-num_tokens // config.block_size)
