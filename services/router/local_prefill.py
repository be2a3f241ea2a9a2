"""Conditional disaggregation: whether a prompt's prefill stays on a decode worker. Pure.

A short or mostly cached prompt may have its first token sooner where it will be decoded: there is no handoff, and
nobody may be queueing. Two estimates are compared (estimates.py says where each number comes from):

- remote: the prefill worker's score, the transfer of what the decode worker lacks, and two hops more;
- local: rest of the decode worker's pass under way + prefill time of (tokens queued there + this prompt's uncached
  tokens there).

What is computed on a decode worker, its streams wait for: a step with n prompt tokens in it is as much longer as the
fit says that n tokens take, base aside, because a step there would have been anyway. The prompt stays when it gains
more than all streams there lose together. Two limits stand above the estimates, because what they leave out grows with
the prompt: streams that come while it is being computed, and the gap that a single stream sees.

How far the decode step under way has got is unknown to the router: it costs the local way up to one inter-token gap
that isn't in the estimate.
"""

from collections.abc import Sequence

import msgspec

from schemas.explanation import BypassReason, LocalPrefill, NoBypassReason
from schemas.worker import PrefillCost
from services.router.estimates import Standing, marginal_s, pass_s, prefill_s

HANDOFF_S = 0.001
"""Two hops more, prefill's result and the decode leg: 0.1 to 0.3 ms each over a nats-server on the same network, and
an event loop's turn as much again."""

MOSTLY = 0.5
"""From such a share of the prompt on, "mostly cached" is the reason."""


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`max_tokens`: most uncached tokens that a decode worker computes; `max_stolen_tokens`: while streams run there.
    `stream_weight`: what a second lost by a stream counts against a second of the newcomer's."""

    is_on: bool = False
    max_tokens: int = 1024
    max_stolen_tokens: int = 128
    stream_weight: float = 1.0
    handoff_s: float = HANDOFF_S


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """The best way by a prefill worker: `prefill_s` until its prefill is done, `is_waiting` for others first or not.
    `transfer`: what fetching KV costs; None: nobody has measured it, or it is hidden behind the prefill."""

    prefill_s: float
    is_waiting: bool = False
    transfer: PrefillCost | None = None


class Weighed(msgspec.Struct, frozen=True):
    """Both ways' seconds with one decode worker; `obstacle` None: the prompt had better stay there."""

    local_s: float
    streams_lose_s: float
    remote_s: float
    obstacle: NoBypassReason | None


def weigh(num_tokens: int, cached_tokens: int, standing: Standing, remote: Remote, settings: LocalSettings) -> Weighed:
    """Return what it means to compute a prompt on this decode worker, which has so many of its tokens."""
    uncached = num_tokens - cached_tokens
    cost, max_batched = standing.cost, standing.max_batched_tokens
    local_s = standing.pass_rest_s + prefill_s(cost, standing.queued_tokens + uncached, max_batched)
    lose_s = standing.requests * marginal_s(cost, uncached, max_batched)
    remote_s = remote.prefill_s + settings.handoff_s
    if remote.transfer is not None:
        remote_s += pass_s(remote.transfer, uncached)
    obstacle: NoBypassReason | None = None
    if not standing.is_measured:
        obstacle = "no estimate"
    elif 0 < standing.capacity_tokens < standing.held_tokens + num_tokens:
        obstacle = "no room"
    elif uncached > settings.max_tokens:
        obstacle = "too long"
    elif standing.requests and uncached > settings.max_stolen_tokens:
        obstacle = "streams are running"
    elif local_s + settings.stream_weight * lose_s >= remote_s:
        obstacle = "prefill is faster"
    return Weighed(local_s, lose_s, remote_s, obstacle)


def least(weighed: Sequence[Weighed], settings: LocalSettings) -> int:
    """Return the one with the least cost among those without obstacle, else among all; `weighed` isn't empty."""
    weight = settings.stream_weight
    return min(
        range(len(weighed)),
        key=lambda one: (
            weighed[one].obstacle is not None,
            weighed[one].local_s + weight * weighed[one].streams_lose_s,
        ),
    )


def verdict(num_tokens: int, cached_tokens: int, standing: Standing, remote: Remote, weighed: Weighed) -> LocalPrefill:
    """Return what is told of it."""
    return LocalPrefill(
        is_taken=weighed.obstacle is None,
        reason=weighed.obstacle or _why(num_tokens, cached_tokens, remote),
        worker=standing.worker,
        local_s=weighed.local_s,
        remote_s=weighed.remote_s,
        streams_lose_s=weighed.streams_lose_s,
        num_streams=standing.requests,
        cached_tokens=cached_tokens,
        uncached_tokens=num_tokens - cached_tokens,
    )


def _why(num_tokens: int, cached_tokens: int, remote: Remote) -> BypassReason:
    if cached_tokens >= MOSTLY * num_tokens:
        return "mostly cached"
    return "prefill is busy" if remote.is_waiting else "short prompt"
