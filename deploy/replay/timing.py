"""How long a pass takes: Dynamo's simulated GPU.

Formulas of ai-dynamo/dynamo lib/mocker/src/common/perf_model.rs@f80944a4, checked against its 1.6.1 wheel to 1e-3 ms.
"""

import msgspec

from schemas.worker import PrefillCost


class DynamoTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of passes of a worker whose KV pool holds `pool_tokens`."""

    pool_tokens: int = 16384 * 64
    prefill: PrefillCost = PrefillCost(base_s=16.50142e-3, token_s=1.518344e-5, token2_s=4.209989e-10)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds to compute so many prompt tokens in one pass."""
        if num_tokens <= 0:
            return 0.0
        cost = self.prefill
        return cost.base_s + num_tokens * (cost.token_s + num_tokens * cost.token2_s)

    def decode_s(self, num_held_tokens: int) -> float:
        """Return the seconds of one decode step over sequences of so many tokens together."""
        used = num_held_tokens / self.pool_tokens
        return max(1e-3, ((54.01 - 25.74 * used) * used + 5.74) * 1e-3)
