"""A trace played in virtual time: arrivals, steps of workers, and what the router hears of them, late."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Protocol

from deploy.replay.agenda import Agenda, Turn
from deploy.replay.dynamo_fleet import DynamoFleet
from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from deploy.replay.paged_fleet import PagedFleet
from deploy.replay.router_side import RouterSide
from deploy.replay.scene import Scene, config_of
from deploy.replay.timing import DynamoTiming
from deploy.replay.trace import TraceRequest
from services.prefix_hash import block_hashes


class Fleet(Protocol):
    """The workers of a replay."""

    def arrive(self, job: Job, now: float) -> None:
        """A request comes: have it routed, and serve it."""
        ...

    def settle(self) -> None:
        """Nothing more is on the agenda: let what is under way get to its ends, or back onto the agenda."""
        ...

    def check_empty(self) -> None:
        """Raise AssertionError unless every block and slot is free again."""
        ...

    def cached_blocks(self) -> set[int]:
        """Return the names of all blocks that the caches told of hold."""
        ...


class Simulation:
    """One replay: `run` returns what it measured."""

    def __init__(self, scene: Scene) -> None:
        self.outcome = Outcome()
        self._scene = scene
        self._agenda = Agenda()
        prefill, decode = (
            [config_of(scene.size, "prefill", number) for number in range(scene.num_prefill)],
            [config_of(scene.size, "decode", number) for number in range(scene.num_decode)],
        )
        self._router = RouterSide(scene.router, prefill, decode, self.outcome)
        self._fleet = self._make_fleet()

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Play all requests to their ends."""
        agenda = self._agenda
        for number, request in enumerate(requests):
            agenda.at(request.arrival_s, Turn.ARRIVAL, partial(self._arrive, number, request))
        while agenda:
            agenda.step()
            if not agenda:
                self._fleet.settle()
        return self.outcome

    def check_empty(self) -> None:
        """Raise AssertionError unless every block and slot is free again: what a finished replay must leave."""
        self._fleet.check_empty()

    def index_drift(self) -> int:
        """Return how many blocks the router's index, once it has heard everything, has too many or too few."""
        self._router.hear(inf)
        return abs(self._router.num_indexed_blocks - len(self._fleet.cached_blocks()))

    def _arrive(self, number: int, request: TraceRequest, now: float) -> None:
        hashes = block_hashes(request.token_ids(), self._scene.size.block_size)
        self._fleet.arrive(Job(number=number, request=request, hashes=hashes), now)

    def _make_fleet(self) -> Fleet:
        scene, timing = self._scene, self._scene.timing
        if isinstance(timing, DynamoTiming):
            return DynamoFleet(scene, timing, self._agenda, self._router, self.outcome)
        return PagedFleet(scene, timing, self._agenda, self._router, self.outcome)
