"""Admission by estimate: whether a request's first token is expected too late for it to be taken at all. Pure.

The limit is the earliest of its deadlines and the router's `max_ttft_s`. A request refused has cost nobody anything:
no worker has heard of it. Nothing is refused for want of an estimate: while no worker has measured a pass, all are
admitted; nor is a completion whose first token came long ago (`resume`): what it needs is to go on. An estimate that
refuses is a lower bound (estimates.least_prefill_s).
"""

import msgspec

from schemas.errors import AdmissionError
from schemas.explanation import Refusal, RefusalReason
from schemas.request import Deadlines

LEAST_RETRY_S = 0.1


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from now to the end of a prompt's prefill, and to its first token at the user's."""

    prefill_s: float
    ttft_s: float


class _Limit(msgspec.Struct, frozen=True):
    reason: RefusalReason
    estimate_s: float
    limit_s: float

    @property
    def over_s(self) -> float:
        return self.estimate_s - self.limit_s


def refusal(estimate: Estimate, deadlines: Deadlines, now: float, max_ttft_s: float) -> Refusal | None:
    """Return why the request isn't taken, None when it is. `now` is Unix time, as the deadlines are; `max_ttft_s` 0:
    no limit of the router's own."""
    worst = max(_limits(estimate, deadlines, now, max_ttft_s), key=lambda one: one.over_s, default=None)
    if worst is None or worst.over_s <= 0:
        return None
    what = "the end of its prefill" if worst.reason == "prefill_deadline" else "its first token"
    return Refusal(
        reason=worst.reason,
        message=f"{what} is estimated in {worst.estimate_s:.3f} s, the limit ({worst.reason}) is {worst.limit_s:.3f} s",
        estimate_s=worst.estimate_s,
        limit_s=worst.limit_s,
        retry_after_s=max(LEAST_RETRY_S, worst.over_s),
    )


def as_error(refused: Refusal) -> AdmissionError:
    """Return what the request's owner hears."""
    return AdmissionError(refused.message, phase="queue", retry_after_s=refused.retry_after_s)


def _limits(estimate: Estimate, deadlines: Deadlines, now: float, max_ttft_s: float) -> list[_Limit]:
    """Return the limits ahead; a deadline that has passed is told as that, by whoever watches it."""
    limits = [_Limit("max_ttft", estimate.ttft_s, max_ttft_s)] if max_ttft_s > 0 else []
    if deadlines.first_token is not None:
        limits.append(_Limit("first_token_deadline", estimate.ttft_s, deadlines.first_token - now))
    if deadlines.prefill is not None:
        limits.append(_Limit("prefill_deadline", estimate.prefill_s, deadlines.prefill - now))
    if deadlines.total is not None:
        limits.append(_Limit("total_deadline", estimate.ttft_s, deadlines.total - now))
    return [one for one in limits if one.limit_s > 0]
