"""The `kv` policy: prefill goes where the first token is expected soonest, decode where it
lengthens steps least. Pure.

Score of a prefill worker (seconds, least wins): rest of its pass under way + prefill time of (tokens queued there +
this prompt's uncached tokens) + transfer. estimates.py says where each number comes from. Workers whose scores differ
by less than `tie_s` are equal, and the one with the oldest cache gets the prompt: what it gives up for it is what was
used longest ago. Always taking the first of several idle workers would pile every new prefix onto one cache.

A choice is one of three: the best, a draw around it (`temperature_s`, so that replicas don't herd), or the session's
own worker if that costs at most `session_slack_s`.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from schemas.explanation import Bid, Choice, LocalPrefill, NoBypassReason
from schemas.ids import WorkerId
from schemas.worker import PrefillCost
from services.router.estimates import (
    FEW_PASSES,
    Link,
    Standing,
    cached_tokens,
    least_prefill_s,
    nearness,
    prefill_s,
    transfer_s,
)
from services.router.local_prefill import LocalSettings, Remote, least, verdict, weigh

Leg = Literal["prefill", "decode"]
Why = Literal[
    "only candidate", "best estimate", "oldest cache of equals", "fewest requests of equals", "drawn", "session"
]


class KvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature_s`: a worker e times as unlikely as the best is this much slower (0: always the best).

    `links`: how fast KV moves between two workers that share no topology label, one, two …; of `levels`, widest
    first. `spill`: decode leaves the neighbourhood when it holds so many times what others hold. `crowding`: see
    choose_decode. `num_explained`: how many bids a decision keeps. `local`: prompts that stay on decode workers.
    """

    tie_s: float = 0.001
    temperature_s: float = 0.0
    session_slack_s: float = 0.05
    spill: float = 1.25
    crowding: float = 0.05
    bytes_per_token: int = 0
    levels: tuple[str, ...] = ("zone", "rack", "host")
    links: tuple[Link, ...] = (Link(),)
    num_explained: int = 8
    local: LocalSettings = LocalSettings()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, and the chosen worker's own bid. `is_measured`: its seconds rest on passes that somebody has made.
    `least_s`: until the prompt is computed, wherever it might go, it takes at least that long; None: too few passes."""

    choice: Choice
    bid: Bid
    is_measured: bool = False
    least_s: float | None = None

    @property
    def worker(self) -> WorkerId:
        return self.choice.worker

    @property
    def score(self) -> float:
        """The chosen bid's; inf: it has no room, nor has anybody else."""
        return math.inf if self.bid.score is None else self.bid.score

    @property
    def is_local(self) -> bool:
        """Whether the prompt stays on a decode worker although there are prefill workers."""
        return self.choice.local is not None and self.choice.local.is_taken


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as far as its placement goes: `overlaps` in blocks of `block_size`, by worker."""

    num_tokens: int
    block_size: int
    overlaps: Mapping[WorkerId, int]
    session_worker: WorkerId | None = None


class KvPolicy:
    """Chooses among standings; keeps nothing but its random numbers."""

    def __init__(self, settings: KvSettings, rng: random.Random) -> None:
        self.settings = settings
        self._rng = rng

    def choose_prefill(self, prompt: Prompt, standings: Sequence[Standing], nearest: Link | None = None) -> Decision:
        """Return who computes the prompt; `standings` isn't empty. `nearest`: the link to where decode may be."""
        link = nearest or self.settings.links[0]
        move_s = transfer_s(prompt.num_tokens, self.settings.bytes_per_token, link)
        scores = [one.pass_rest_s + _work_s(prompt, one) + move_s for one in standings]
        index, why = self._pick("prefill", scores, standings, prompt.session_worker)
        bids = {one: _prefill_bid(prompt, standings[one], scores[one], move_s) for one in self._shown(index, scores)}
        choice = Choice(
            leg="prefill",
            worker=standings[index].worker,
            why=why,
            bids=tuple(bids.values()),
            num_candidates=len(standings),
            best_overlap_tokens=_best_overlap(prompt, standings),
        )
        return Decision(
            choice=choice,
            bid=bids[index],
            is_measured=standings[index].is_measured,
            least_s=_least_s(prompt, [standings[one] for one in bids]),
        )

    def stay_or_go(
        self, prompt: Prompt, remote: Decision, standings: Sequence[Standing], transfer: PrefillCost | None
    ) -> Decision:
        """Return who of these decode workers computes the prompt where it gains by that, else `remote` with the reason
        why not; `standings` isn't empty. `transfer`: as local_prefill.Remote has it."""
        settings = self.settings.local
        way = Remote(
            prefill_s=remote.score,
            is_waiting=remote.bid.pass_rest_s > 0 or remote.bid.queued_tokens > 0,
            transfer=transfer,
        )
        cached = [_cached(prompt, one.worker) for one in standings]
        weighed = [
            weigh(prompt.num_tokens, hit, one, way, settings) for hit, one in zip(cached, standings, strict=True)
        ]
        free = [index for index, one in enumerate(weighed) if one.obstacle is None]
        if not free:
            index = least(weighed, settings)
            why_not = verdict(prompt.num_tokens, cached[index], standings[index], way, weighed[index])
            return _with_local(remote, why_not)
        scores = [weighed[one].local_s + settings.stream_weight * weighed[one].streams_lose_s for one in free]
        among = [standings[one] for one in free]
        picked, why = self._pick("prefill", scores, among, None)
        bids = {one: _prefill_bid(prompt, among[one], scores[one], 0.0) for one in self._shown(picked, scores)}
        index = free[picked]
        choice = Choice(
            leg="prefill",
            worker=standings[index].worker,
            why=why,
            bids=tuple(bids.values()),
            num_candidates=len(free),
            best_overlap_tokens=max(remote.choice.best_overlap_tokens, _best_overlap(prompt, among)),
            local=verdict(prompt.num_tokens, cached[index], standings[index], way, weighed[index]),
        )
        return Decision(
            choice=choice, bid=bids[picked], is_measured=True, least_s=_least_s(prompt, [among[one] for one in bids])
        )

    def choose_decode(self, num_tokens: int, standings: Sequence[Standing], source: dict[str, str]) -> Decision:
        """Return who decodes a prompt of so many tokens, among those near; full pools last.

        Each token held lengthens a step for every request there, so that a prompt of n tokens costs itself the
        tokens held and the others n each: score = held + `crowding` * requests * n. With crowding 1 that is the sum of
        all gaps (least mean ITL, a longer tail), with 0 only the newcomer's own.

        `source`: the prefill worker's labels.
        """
        near = near_enough(standings, source, self.settings.levels, self.settings.spill)
        scores = [self._decode_score(num_tokens, one) for one in near]
        index, why = self._pick("decode", scores, near, None)
        bids = {one: self._decode_bid(num_tokens, near[one], scores[one], source) for one in self._shown(index, scores)}
        choice = Choice(
            leg="decode",
            worker=near[index].worker,
            why=why,
            bids=tuple(bids.values()),
            num_candidates=len(near),
        )
        return Decision(choice=choice, bid=bids[index])

    def link(self, one: dict[str, str], other: dict[str, str]) -> Link:
        """Return how fast KV moves between two workers with these labels."""
        links = self.settings.links
        return links[min(nearness(one, other, self.settings.levels), len(links) - 1)]

    def _decode_score(self, num_tokens: int, standing: Standing) -> float:
        held = standing.held_tokens
        if 0 < standing.capacity_tokens < held + num_tokens:
            return math.inf
        return held + self.settings.crowding * standing.requests * num_tokens

    def _decode_bid(self, num_tokens: int, standing: Standing, score: float, source: dict[str, str]) -> Bid:
        link = self.link(source, standing.labels)
        return Bid(
            worker=standing.worker,
            score=None if score == math.inf else score,
            held_tokens=standing.held_tokens,
            transfer_s=transfer_s(num_tokens, self.settings.bytes_per_token, link),
        )

    def _shown(self, index: int, scores: list[float]) -> list[int]:
        """Return whose bids a decision keeps: the best, and in any case the chosen one."""
        best = heapq.nsmallest(self.settings.num_explained, range(len(scores)), key=scores.__getitem__)
        return best if index in best else [index, *best]

    def _pick(
        self, leg: Leg, scores: list[float], standings: Sequence[Standing], session_worker: WorkerId | None
    ) -> tuple[int, Why]:
        settings = self.settings
        if len(scores) == 1:
            return 0, "only candidate"
        best = min(scores)
        if session_worker is not None:
            for index, one in enumerate(standings):
                if one.worker == session_worker and scores[index] <= best + settings.session_slack_s:
                    return index, "session"
        if leg == "prefill" and settings.temperature_s > 0:
            return draw(scores, settings.temperature_s, self._rng), "drawn"
        slack = settings.tie_s if leg == "prefill" else 0.0
        equals = [index for index, score in enumerate(scores) if score <= best + slack]
        if len(equals) == 1:
            return equals[0], "best estimate"
        # The draw comes last: routers that know the same of idle workers would all take the same one.
        chance = self._rng.random
        oldest = min(equals, key=lambda one: (standings[one].oldest_at, standings[one].requests, scores[one], chance()))
        return oldest, "oldest cache of equals" if leg == "prefill" else "fewest requests of equals"


def without_local(remote: Decision, reason: NoBypassReason) -> Decision:
    """Return the decision with the reason why no decode worker was looked at."""
    return _with_local(remote, LocalPrefill(is_taken=False, reason=reason))


def _with_local(remote: Decision, local: LocalPrefill) -> Decision:
    return msgspec.structs.replace(remote, choice=msgspec.structs.replace(remote.choice, local=local))


def _cached(prompt: Prompt, worker: WorkerId) -> int:
    overlap = prompt.overlaps.get(worker, 0)
    return cached_tokens(overlap, prompt.block_size, prompt.num_tokens) if overlap else 0


def _best_overlap(prompt: Prompt, standings: Sequence[Standing]) -> int:
    """Return the tokens of the longest prefix that any of these workers has."""
    longest = max((prompt.overlaps.get(one.worker, 0) for one in standings), default=0) if prompt.overlaps else 0
    return cached_tokens(longest, prompt.block_size, prompt.num_tokens) if longest else 0


def _work_s(prompt: Prompt, standing: Standing) -> float:
    """Return the seconds to compute what is queued on a worker and then the prompt."""
    num_tokens = standing.queued_tokens + prompt.num_tokens - _cached(prompt, standing.worker)
    return prefill_s(standing.cost, num_tokens, standing.max_batched_tokens)


def _least_s(prompt: Prompt, standings: Sequence[Standing]) -> float | None:
    """Return the soonest that any of these may be done."""
    if any(one.cost.num_passes < FEW_PASSES for one in standings):
        return None
    return min(
        one.pass_rest_s
        + least_prefill_s(
            one.cost, one.queued_tokens + prompt.num_tokens - _cached(prompt, one.worker), one.max_batched_tokens
        )
        for one in standings
    )


def _prefill_bid(prompt: Prompt, standing: Standing, score: float, move_s: float) -> Bid:
    cached = _cached(prompt, standing.worker)
    return Bid(
        worker=standing.worker,
        score=score,
        cached_tokens=cached,
        uncached_tokens=prompt.num_tokens - cached,
        queued_tokens=standing.queued_tokens,
        pass_rest_s=standing.pass_rest_s,
        prefill_s=_work_s(prompt, standing),
        transfer_s=move_s,
    )


def draw(scores: Sequence[float], temperature: float, rng: random.Random) -> int:
    """Return an index, drawn with weights exp(-(score - best) / temperature)."""
    best = min(scores)
    return rng.choices(range(len(scores)), [math.exp((best - one) / temperature) for one in scores])[0]


def near_enough(
    standings: Sequence[Standing], source: dict[str, str], levels: tuple[str, ...], spill: float
) -> list[Standing]:
    """Return the workers nearest to `source` by topology labels, unless even the least loaded of them holds more than
    `spill` times what some farther worker holds: then these too, and so on outwards."""
    least = min(one.held_tokens for one in standings)
    for shared in range(len(levels), 0, -1):
        near = [one for one in standings if nearness(source, one.labels, levels) >= shared]
        if near and min(one.held_tokens for one in near) <= spill * least:
            return near
    return list(standings)
