"""What the `kv` policy believes, each estimate with its source. Pure arithmetic over what workers report.

- Seconds of a prefill pass of n tokens: the worker's own fit of its passes, reported with its load (PrefillCost:
  base + token * n + token2 * n^2; services/pass_times.py). Quadratic, because attention over a chunk is. A worker that
  has made few passes is taken for as fast as the one that has made most: guessed too slow, it would never be tried.
- Tokens in front: the worker's report (queued prompts, less what their router expected to be cached) and this
  router's dispatches that no report has counted yet (loads.py).
- Rest of the pass under way: its estimated seconds, less its age in the report, less the report's own age.
- Uncached tokens: the prompt less its longest prefix in the index, or among prompts routed there and not done; whole
  blocks, and never the last token: it is always computed (services/engines/paged/planner.py).
- Transfer: latency + bytes a token / bandwidth, by how near the two workers are to each other, where that is set
  (replays). Live, the decode workers' own fit of what fetching n tokens' KV after a prefill took them
  (LoadReport.transfer_cost): the same for every prefill worker, so that only local_prefill.py and admission.py ask.
- Nobody has computed anything yet: DEFAULT_COST, which `is_measured` False marks: enough for an order among workers,
  nothing to refuse a request by.
"""

import msgspec

from schemas.ids import WorkerId
from schemas.worker import PrefillCost

DEFAULT_COST = PrefillCost(base_s=0.01, token_s=1e-4, token2_s=0.0)
"""While nobody has computed anything yet: 10,000 tokens/s. It is the same for all, and only order counts."""

FEW_PASSES = 16
"""From so many passes on, a worker's own fit counts, not that of the most experienced."""

TRUSTED_GROWTH = 8
"""So many times the largest pass seen is as far as a fit is believed when a request would be refused by it."""

MAX_CHUNK_TOKENS = 1 << 30


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows of a worker when it chooses.

    `queued_tokens` are behind the pass under way, which takes `pass_rest_s` more. `is_measured`: the cost comes from
    passes somebody has made. `held_tokens` are in its KV pool of
    `capacity_tokens`. `oldest_at` is when its oldest cache content came (cache_age.py).
    """

    worker: WorkerId
    queued_tokens: int = 0
    pass_rest_s: float = 0.0
    cost: PrefillCost = DEFAULT_COST
    is_measured: bool = False
    max_batched_tokens: int = MAX_CHUNK_TOKENS
    held_tokens: int = 0
    capacity_tokens: int = 0
    requests: int = 0
    oldest_at: float = 0.0
    labels: dict[str, str] = {}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How fast KV moves between two workers; 0 GB/s: at once."""

    latency_s: float = 0.0
    gb_per_s: float = 0.0


def settled_cost(own: PrefillCost | None, most_experienced: PrefillCost | None) -> PrefillCost:
    """Return what to expect of a worker's passes."""
    if own is not None and own.num_passes >= FEW_PASSES:
        return own
    return most_experienced or own or DEFAULT_COST


def pass_s(cost: PrefillCost, num_tokens: int) -> float:
    """Return the seconds of one pass of so many prompt tokens; none for none."""
    if num_tokens <= 0:
        return 0.0
    return cost.base_s + num_tokens * (cost.token_s + num_tokens * cost.token2_s)


def prefill_s(cost: PrefillCost, num_tokens: int, max_batched_tokens: int) -> float:
    """Return the seconds to compute so many prompt tokens in passes of at most `max_batched_tokens`."""
    num_full, rest = divmod(num_tokens, max_batched_tokens)
    return (num_full * pass_s(cost, max_batched_tokens) if num_full else 0.0) + pass_s(cost, rest)


def least_prefill_s(cost: PrefillCost, num_tokens: int, max_batched_tokens: int) -> float:
    """Return seconds that so many prompt tokens take at least, as far as is known: a pass of more than TRUSTED_GROWTH
    times the largest one seen counts as one of that size.

    Sizes that are all alike tell no slope, small ones a bad one; and a long prompt that is guessed too slow to be let
    in would never be measured."""
    known = TRUSTED_GROWTH * cost.max_tokens or max_batched_tokens
    num_full, rest = divmod(num_tokens, max_batched_tokens)
    return num_full * pass_s(cost, min(max_batched_tokens, known)) + pass_s(cost, min(rest, known))


def marginal_s(cost: PrefillCost, num_tokens: int, max_batched_tokens: int) -> float:
    """Return by how many seconds so many prompt tokens lengthen steps that are made anyway."""
    num_steps = -(-num_tokens // max_batched_tokens)
    return prefill_s(cost, num_tokens, max_batched_tokens) - num_steps * cost.base_s


def cached_tokens(num_blocks: int, block_size: int, num_tokens: int) -> int:
    """Return how many tokens of a prompt a prefix hit of so many blocks saves."""
    return min(num_blocks, (num_tokens - 1) // block_size) * block_size


def transfer_s(num_tokens: int, bytes_per_token: int, link: Link) -> float:
    """Return the seconds to move a prompt's KV."""
    return link.latency_s + (num_tokens * bytes_per_token / (link.gb_per_s * 1e9) if link.gb_per_s else 0.0)


def nearness(one: dict[str, str], other: dict[str, str], levels: tuple[str, ...]) -> int:
    """Return how many of the topology labels in `levels` (widest first: "zone", "rack", "host") two workers share,
    counted until the first that differs or that one of them lacks."""
    shared = 0
    for label in levels:
        if label not in one or one[label] != other.get(label):
            break
        shared += 1
    return shared
