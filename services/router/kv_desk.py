"""The `kv` policy at work for live requests: hashes prompts, asks each model's KvRouting, remembers what was sent.

No I/O: times are passed, messages are taken as they come.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from schemas.ids import AttemptId, WorkerId
from schemas.kv_events import KvEvents
from schemas.request import GenerateRequest
from schemas.worker import LoadReport, RuntimeConfig
from services.prefix_hash import BlockHashes, block_hashes
from services.router.candidates import Candidate
from services.router.kv_feed import KvFeed
from services.router.kv_policy import Decision, KvPolicy, KvSettings
from services.router.kv_routing import KvMemory, KvRouting

MAX_PROMPTS = 1024
"""Prompts whose hashes are kept, for a second choice."""

MAX_UNDER_WAY = 16384
"""Dispatched prompts remembered until their prefill is over."""

Realm = tuple[str, str, int]
"""Model, its digest, block size: blocks of two realms are never the same, however equal their names."""


class _UnderWay(msgspec.Struct, frozen=True):
    routing: KvRouting
    number: int


class KvDesk:
    """One router's knowledge of all models' caches. `feed` keeps it in step with the workers."""

    def __init__(self, settings: KvSettings, memory: KvMemory, rng: random.Random) -> None:
        self.feed = KvFeed()
        self._policy = KvPolicy(settings, rng)
        self._memory = memory
        self._routings: dict[Realm, KvRouting] = {}
        self._configs: dict[WorkerId, RuntimeConfig] = {}
        self._prompts: OrderedDict[tuple[AttemptId, int], BlockHashes] = OrderedDict()
        self._under_way: OrderedDict[AttemptId, _UnderWay] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Different blocks that some worker has told of."""
        return sum(routing.index.num_blocks for routing in self._routings.values())

    def joined(self, config: RuntimeConfig) -> None:
        """A worker is there, or changed."""
        self._configs[config.worker_id] = config
        if config.has_kv_events:
            self.feed.follow(config.worker_id, config.epoch, self._routing(config).index)

    def left(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self.feed.forget(worker)
        self._configs.pop(worker, None)
        for routing in self._routings.values():
            routing.forget(worker)

    def on_events(self, events: KvEvents) -> None:
        """A worker's cache changed."""
        self.feed.on_events(events)

    def on_report(self, report: LoadReport) -> None:
        """A report says how far the worker's events should have come."""
        self.feed.on_last_id(report.worker_id, report.epoch, report.last_kv_event)

    def choose_prompt(self, request: GenerateRequest, candidates: Sequence[Candidate], now: float) -> Decision:
        """Return who computes the request's prompt (and, aggregated, decodes it); `candidates` isn't empty.

        Resumed ids are computed too. Workers whose blocks differ in size are judged apart, then by their estimates.
        """
        groups: dict[int, list[Candidate]] = {}
        for one in candidates:
            groups.setdefault(one.config.block_size, []).append(one)
        num_tokens = len(request.token_ids) + len(request.resume)
        decisions = [
            self._routing(some[0].config).choose_prefill(num_tokens, self._hashes(request, block_size), some, now)
            for block_size, some in groups.items()
        ]
        return min(decisions, key=lambda one: one.score)

    def choose_decode(
        self, request: GenerateRequest, candidates: Sequence[Candidate], prefill_worker: WorkerId | None
    ) -> Decision:
        """Return who takes the KV over from a prefill worker."""
        source = self._configs.get(prefill_worker) if prefill_worker is not None else None
        routing = self._routing(candidates[0].config)
        num_tokens = len(request.token_ids) + len(request.resume)
        return routing.choose_decode(num_tokens, candidates, source.labels if source is not None else {})

    def sent(
        self, request: GenerateRequest, number: int, decision: Decision, config: RuntimeConfig, now: float
    ) -> None:
        """A prompt is on its way to the chosen worker."""
        routing = self._routing(config)
        capacity = config.total_kv_blocks * config.block_size
        routing.dispatched(number, decision, self._hashes(request, config.block_size), capacity, now)
        if config.has_kv_events:
            self._under_way[request.attempt_id] = _UnderWay(routing, number)
            if len(self._under_way) > MAX_UNDER_WAY:
                self._under_way.popitem(last=False)

    def over(self, attempt_id: AttemptId) -> None:
        """The attempt's prompt is done, or nobody computes it; from events it is known what was cached of it."""
        one = self._under_way.pop(attempt_id, None)
        if one is not None:
            one.routing.prefilled(one.number)

    def _routing(self, config: RuntimeConfig) -> KvRouting:
        realm = (config.model, config.model_digest, config.block_size)
        if realm not in self._routings:
            self._routings[realm] = KvRouting(self._policy, config.block_size, self._memory)
        return self._routings[realm]

    def _hashes(self, request: GenerateRequest, block_size: int) -> BlockHashes:
        key = (request.attempt_id, block_size)
        hashes = self._prompts.get(key)
        if hashes is None:
            ids = request.token_ids + request.resume if request.resume else request.token_ids
            hashes = self._prompts[key] = block_hashes(ids, block_size, request.cache_salt)
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)
        return hashes
