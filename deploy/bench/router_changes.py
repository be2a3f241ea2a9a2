"""Decision quality while routers come and go: 2P2D, two routers, steady shared prefixes; one router is killed,
later another one is started. Quality is what the prompts found cached where they went, and what they gave up against
the best overlap that their router knew of.
"""

from statistics import fmean

import msgspec

from deploy.bench.live_fleet import LiveFleet, live_fleet, names_of
from deploy.bench.live_routing import ENGINE_ARGS, WORK
from deploy.bench.shared_prefixes import Asked, play, reuse

RATE = 5.0
WARM_UP, STEADY, FIRST_2_S = 64, 40, 10
"""Requests; the last is what comes within 2 s."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """`regret_tokens`: mean of the best overlap known less the chosen worker's, of `num_explained` requests."""

    reuse: float
    regret_tokens: float
    num_explained: int
    routers: dict[str, int]
    errors: list[str]


async def measure() -> dict[str, Phase]:
    """Return the quality before, in the 2 s after a router was killed, afterwards, in the first 2 s of a new router,
    and afterwards."""
    async with live_fleet(*names_of(g=1, r=2, p=2, d=2), policy="kv", engine_args=ENGINE_ARGS) as fleet:
        player = _Player(fleet)
        await player.play(WARM_UP)
        found = {"before": await player.play(STEADY)}
        fleet.kill("r1")
        found["2 s after a kill"] = await player.play(FIRST_2_S)
        found["after the kill"] = await player.play(STEADY)
        fleet.start("r2")
        await fleet.until_live(60.0)
        found["2 s of a new router"] = await player.play(FIRST_2_S)
        found["with the new router"] = await player.play(STEADY)
        return found


class _Player:
    """Goes on with the workload where it was."""

    def __init__(self, fleet: LiveFleet) -> None:
        self._fleet = fleet
        self._next = 0

    async def play(self, count: int) -> Phase:
        numbers = range(self._next, self._next + count)
        self._next += count
        asked = await play(self._fleet, WORK, numbers=numbers, rate=RATE)
        return await self._phase(asked)

    async def _phase(self, asked: list[Asked]) -> Phase:
        known = [await self._fleet.choices(one.request_id) for one in asked]
        prompts = [choices[0] for choices in known if choices]
        regrets = [
            choice.best_overlap_tokens - next(bid.cached_tokens for bid in choice.bids if bid.worker == choice.worker)
            for choice in prompts
        ]
        routers = sorted(one.router for one in asked)
        return Phase(
            reuse=reuse(asked),
            regret_tokens=fmean(regrets) if regrets else 0.0,
            num_explained=len(regrets),
            routers={name: routers.count(name) for name in dict.fromkeys(routers)},
            errors=[one.error for one in asked if one.error],
        )
