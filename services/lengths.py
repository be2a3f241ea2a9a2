"""A request's sequence in tokens, and whether it fits a worker: engines refuse by it (services.engines.paged.limits),
routers before anybody is asked. Pure.

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

    @property
    def num_to_prefill(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_to_hold(self) -> int:
        """Tokens whose KV is there at the end; the last one's is never computed."""
        return self.num_prompt_tokens + max(self.num_resumed_tokens, self.max_tokens - 1)

    def fit_prefill(self, config: RuntimeConfig) -> bool:
        """Return whether the worker can compute the prompt: its pool needs to hold no more than that."""
        return self._fit(self.num_to_prefill, config)

    def fit_decode(self, config: RuntimeConfig) -> bool:
        """Return whether the worker can hold the sequence to its end."""
        return self._fit(self.num_to_hold, config)

    def _fit(self, num_tokens: int, config: RuntimeConfig) -> bool:
        is_within_context = self.num_prompt_tokens + self.max_tokens <= config.max_context_tokens
        return is_within_context and num_blocks(num_tokens, config.block_size) <= config.total_kv_blocks


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold the KV of this many tokens."""
    return -(-num_tokens // block_size)
