"""What this router's decisions come to, in totals by model. Pure: no clock, `now` is passed, in monotonic seconds.

A prompt counts once a worker has taken it, with what the router believed of it then. Where a prefill worker computes
it, the router hears when that is done: the time from the dispatch to that message, the message's way included, is held
against the estimate. What a decode worker computes (aggregated, or a prompt that stayed) it never hears of.
"""

from bisect import bisect_left
from collections import OrderedDict

import msgspec

from schemas.explanation import Choice, RefusalReason
from schemas.ids import AttemptId, Epoch
from schemas.router_report import ERROR_BUCKETS_S, RouterReport, RoutingTotals

MAX_EXPECTED = 16384
"""Dispatched prefills whose end is still awaited; older ones are forgotten."""


class _Counts:
    __slots__ = (
        "actual_s",
        "bypasses",
        "error_counts",
        "error_sum_s",
        "estimated_s",
        "num_cached_tokens",
        "num_estimates",
        "num_missed_tokens",
        "num_prompt_tokens",
        "num_prompts",
        "refusals",
    )

    def __init__(self) -> None:
        self.num_prompts = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_missed_tokens = 0
        self.bypasses: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.num_estimates = 0
        self.estimated_s = 0.0
        self.actual_s = 0.0
        self.error_sum_s = 0.0
        self.error_counts = [0] * (len(ERROR_BUCKETS_S) + 1)


class _Expected(msgspec.Struct, frozen=True):
    model: str
    sent_at: float
    seconds: float


class RoutingTally:
    """Counts; `report` tells. Models are those the router serves, reasons those of schemas.explanation."""

    def __init__(self) -> None:
        self._models: dict[str, _Counts] = {}
        self._expected: OrderedDict[AttemptId, _Expected] = OrderedDict()

    def taken(self, model: str, choice: Choice | None) -> None:
        """A worker has taken a prompt; `choice`: policy kv's."""
        counts = self._of(model)
        counts.num_prompts += 1
        if choice is None:
            return
        bid = next(one for one in choice.bids if one.worker == choice.worker)
        counts.num_prompt_tokens += bid.cached_tokens + bid.uncached_tokens
        counts.num_cached_tokens += bid.cached_tokens
        counts.num_missed_tokens += max(0, choice.best_overlap_tokens - bid.cached_tokens)
        if choice.local is not None and choice.local.is_taken:
            counts.bypasses[choice.local.reason] = counts.bypasses.get(choice.local.reason, 0) + 1

    def refused(self, model: str, reason: RefusalReason) -> None:
        """A request was taken by nobody."""
        counts = self._of(model)
        counts.refusals[reason] = counts.refusals.get(reason, 0) + 1

    def expect(self, attempt_id: AttemptId, model: str, seconds: float, now: float) -> None:
        """A prompt is sent to a prefill worker, and its result expected after so many seconds."""
        self._expected[attempt_id] = _Expected(model, now, seconds)
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def forget(self, attempt_id: AttemptId) -> None:
        """That prompt's result won't come, or tells nothing."""
        self._expected.pop(attempt_id, None)

    def prefilled(self, attempt_id: AttemptId, now: float) -> None:
        """A prompt's result has come."""
        expected = self._expected.pop(attempt_id, None)
        if expected is None:
            return
        counts, actual_s = self._of(expected.model), now - expected.sent_at
        counts.num_estimates += 1
        counts.estimated_s += expected.seconds
        counts.actual_s += actual_s
        error_s = abs(expected.seconds - actual_s)
        counts.error_sum_s += error_s
        counts.error_counts[bisect_left(ERROR_BUCKETS_S, error_s)] += 1

    def report(self, router: str, epoch: Epoch) -> RouterReport:
        """Return the totals."""
        return RouterReport(
            router=router,
            epoch=epoch,
            totals=tuple(_totals(model, counts) for model, counts in self._models.items()),
        )

    def _of(self, model: str) -> _Counts:
        return self._models.setdefault(model, _Counts())


def _totals(model: str, counts: _Counts) -> RoutingTotals:
    return RoutingTotals(
        model=model,
        num_prompts=counts.num_prompts,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_cached_tokens=counts.num_cached_tokens,
        num_missed_tokens=counts.num_missed_tokens,
        bypasses=dict(counts.bypasses),
        refusals=dict(counts.refusals),
        num_estimates=counts.num_estimates,
        estimated_s=counts.estimated_s,
        actual_s=counts.actual_s,
        error_sum_s=counts.error_sum_s,
        error_counts=tuple(counts.error_counts) if counts.num_estimates else (),
    )
