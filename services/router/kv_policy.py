"""The `kv` policy: prefill goes where the first token is expected soonest, decode where it
lengthens steps least. Pure.

Score of a prefill worker (seconds, least wins): rest of its pass under way + prefill time of (tokens queued there +
this prompt's uncached tokens) + transfer. estimates.py says where each number comes from. Workers whose scores differ
by less than `tie_s` are equal, and the one with the oldest cache gets the prompt: what it gives up for it is what was
used longest ago. Always taking the first of several idle workers would pile every new prefix onto one cache.

A choice is one of three: the best, a draw around it (`temperature_s`, so that replicas don't herd), or the session's
own worker if that costs at most `session_slack_s`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from schemas.ids import WorkerId
from services.router.estimates import Link, Standing, cached_tokens, nearness, prefill_s, transfer_s

Leg = Literal["prefill", "decode"]
Why = Literal[
    "only candidate", "best estimate", "oldest cache of equals", "fewest requests of equals", "drawn", "session"
]


class KvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature_s`: a worker e times as unlikely as the best is this much slower (0: always the best).

    `links`: how fast KV moves between two workers that share no topology label, one, two …; of `levels`, widest
    first. `spill`: decode leaves the neighbourhood when it holds so many times what others hold. `crowding`: see
    choose_decode. `num_explained`: how many bids a decision keeps.
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


class Bid(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker would make of a prompt, or (decode) of its KV. Times in seconds; `score` decides, least wins."""

    worker: WorkerId
    score: float
    cached_tokens: int = 0
    uncached_tokens: int = 0
    queued_tokens: int = 0
    held_tokens: int = 0
    pass_rest_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A choice and its reasons: the best bids first, the chosen one always among them."""

    leg: Leg
    worker: WorkerId
    why: Why
    bids: tuple[Bid, ...]
    num_candidates: int
    best_overlap_tokens: int = 0

    @property
    def bid(self) -> Bid:
        """The chosen worker's."""
        return next(one for one in self.bids if one.worker == self.worker)


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
        bids = [self._prefill_bid(prompt, one, link) for one in standings]
        return self._decide("prefill", bids, standings, prompt.session_worker)

    def choose_decode(self, num_tokens: int, standings: Sequence[Standing], source: dict[str, str]) -> Decision:
        """Return who decodes a prompt of so many tokens, among those near; full pools last.

        Each token held lengthens a step for every request there, so that a prompt of n tokens costs itself the
        tokens held and the others n each: score = held + `crowding` * requests * n. With crowding 1 that is the sum of
        all gaps (least mean ITL, a longer tail), with 0 only the newcomer's own.

        `source`: the prefill worker's labels.
        """
        near = near_enough(standings, source, self.settings.levels, self.settings.spill)
        bids = [self._decode_bid(num_tokens, one, self.link(source, one.labels)) for one in near]
        return self._decide("decode", bids, near, None)

    def link(self, one: dict[str, str], other: dict[str, str]) -> Link:
        """Return how fast KV moves between two workers with these labels."""
        links = self.settings.links
        return links[min(nearness(one, other, self.settings.levels), len(links) - 1)]

    def _prefill_bid(self, prompt: Prompt, standing: Standing, link: Link) -> Bid:
        cached = 0
        overlap = prompt.overlaps.get(standing.worker, 0)
        if overlap:
            cached = cached_tokens(overlap, prompt.block_size, prompt.num_tokens)
        uncached = prompt.num_tokens - cached
        work_s = prefill_s(standing.cost, standing.queued_tokens + uncached, standing.max_batched_tokens)
        move_s = transfer_s(prompt.num_tokens, self.settings.bytes_per_token, link)
        return Bid(
            worker=standing.worker,
            score=standing.pass_rest_s + work_s + move_s,
            cached_tokens=cached,
            uncached_tokens=uncached,
            queued_tokens=standing.queued_tokens,
            pass_rest_s=standing.pass_rest_s,
            prefill_s=work_s,
            transfer_s=move_s,
        )

    def _decode_bid(self, num_tokens: int, standing: Standing, link: Link) -> Bid:
        held = standing.held_tokens
        is_full = 0 < standing.capacity_tokens < held + num_tokens
        return Bid(
            worker=standing.worker,
            score=math.inf if is_full else held + self.settings.crowding * standing.requests * num_tokens,
            held_tokens=held,
            transfer_s=transfer_s(num_tokens, self.settings.bytes_per_token, link),
        )

    def _decide(
        self, leg: Leg, bids: list[Bid], standings: Sequence[Standing], session_worker: WorkerId | None
    ) -> Decision:
        index, why = self._pick(leg, bids, standings, session_worker)
        best_first = sorted(range(len(bids)), key=lambda one: bids[one].score)[: self.settings.num_explained]
        if index not in best_first:
            best_first = [index, *best_first]
        return Decision(
            leg=leg,
            worker=bids[index].worker,
            why=why,
            bids=tuple(bids[one] for one in best_first),
            num_candidates=len(bids),
            best_overlap_tokens=max(one.cached_tokens for one in bids),
        )

    def _pick(
        self, leg: Leg, bids: list[Bid], standings: Sequence[Standing], session_worker: WorkerId | None
    ) -> tuple[int, Why]:
        settings = self.settings
        if len(bids) == 1:
            return 0, "only candidate"
        best = min(bid.score for bid in bids)
        for index, bid in enumerate(bids):
            if bid.worker == session_worker and bid.score <= best + settings.session_slack_s:
                return index, "session"
        if leg == "prefill" and settings.temperature_s > 0:
            return draw([bid.score for bid in bids], settings.temperature_s, self._rng), "drawn"
        slack = settings.tie_s if leg == "prefill" else 0.0
        equals = [index for index, bid in enumerate(bids) if bid.score <= best + slack]
        if len(equals) == 1:
            return equals[0], "best estimate"
        oldest = min(equals, key=lambda one: (standings[one].oldest_at, standings[one].requests, bids[one].score))
        return oldest, "oldest cache of equals" if leg == "prefill" else "fewest requests of equals"


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
