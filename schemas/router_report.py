"""What a router says of its own work: totals since it began, told once a second for whoever shows them."""

import msgspec

from schemas.ids import Epoch
from schemas.message import Message

ERROR_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of |estimated - actual| prefill seconds; one more bucket has the rest."""


class RoutingTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one model, as the router believed it when a worker had taken the prompt (policy kv; others count requests,
    refusals and nothing else).

    `num_prompts` of `num_prompt_tokens`, of which `num_cached_tokens` were a prefix hit where they went, and
    `num_missed_tokens` more would have been on the candidate with the longest one. `bypasses` and `refusals` by reason
    (schemas.explanation). `num_estimates` prefills that were estimated to take `estimated_s` from dispatch to result
    and took `actual_s`; `error_counts` has the differences by ERROR_BUCKETS_S.
    """

    model: str
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_missed_tokens: int = 0
    bypasses: dict[str, int] = {}
    refusals: dict[str, int] = {}
    num_estimates: int = 0
    estimated_s: float = 0.0
    actual_s: float = 0.0
    error_sum_s: float = 0.0
    error_counts: tuple[int, ...] = ()


class RouterReport(Message, frozen=True, kw_only=True, omit_defaults=True, tag="router_report.v1"):
    """A router's totals, by model."""

    router: str
    epoch: Epoch
    totals: tuple[RoutingTotals, ...] = ()
