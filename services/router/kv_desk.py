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
from schemas.worker import LoadReport, PrefillCost, RuntimeConfig
from services.prefix_hash import BlockHashes, block_hashes
from services.router.admission import Estimate
from services.router.candidates import Candidate
from services.router.estimates import pass_s
from services.router.kv_feed import KvFeed
from services.router.kv_policy import Decision, KvPolicy, KvSettings, without_local
from services.router.kv_routing import KvMemory, KvRouting
from services.router.sessions import home_of

MAX_PROMPTS = 1024
"""Prompts whose hashes are kept, for a second choice."""

MAX_UNDER_WAY = 16384
"""Dispatched prompts remembered until their prefill is over."""

Realm = tuple[str, str, int]
"""Model, its digest, block size: blocks of two realms are never the same, however equal their names."""


class _UnderWay(msgspec.Struct, frozen=True):
    """`decoder`: who computes the prompt and decodes it: no result of its prefill comes."""

    routing: KvRouting
    number: int
    decoder: WorkerId | None


class KvDesk:
    """One router's knowledge of all models' caches. `feed` keeps it in step with the workers."""

    def __init__(self, settings: KvSettings, memory: KvMemory, rng: random.Random) -> None:
        self.feed = KvFeed()
        self.local = settings.local
        self._policy = KvPolicy(settings, rng)
        self._memory = memory
        self._routings: dict[Realm, KvRouting] = {}
        self._configs: dict[WorkerId, RuntimeConfig] = {}
        self._prompts: OrderedDict[tuple[AttemptId, int], BlockHashes] = OrderedDict()
        self._under_way: OrderedDict[AttemptId, _UnderWay] = OrderedDict()
        self._at_decoders: dict[WorkerId, dict[AttemptId, int]] = {}
        self._transfers: dict[str, dict[WorkerId, PrefillCost]] = {}

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
        self._at_decoders.pop(worker, None)
        config = self._configs.pop(worker, None)
        if config is not None:
            self._transfers.get(config.compat, {}).pop(worker, None)
        for routing in self._routings.values():
            routing.forget(worker)

    def on_events(self, events: KvEvents) -> None:
        """A worker's cache changed."""
        self.feed.on_events(events)

    def on_report(self, report: LoadReport, last_counted: int = 0) -> None:
        """A report says how far the worker's events should have come, and, when no prompt waits there, that those of
        our dispatches up to `last_counted` are computed, of whom no result tells."""
        self.feed.on_last_id(report.worker_id, report.epoch, report.last_kv_event)
        config = self._configs.get(report.worker_id)
        if report.transfer_cost is not None and config is not None:
            self._transfers.setdefault(config.compat, {})[report.worker_id] = report.transfer_cost
        if not report.queued_prefill_tokens:
            waiting = self._at_decoders.get(report.worker_id, {})
            for attempt_id in [attempt_id for attempt_id, number in waiting.items() if number <= last_counted]:
                del waiting[attempt_id]
                self.over(attempt_id)

    def choose_prompt(self, request: GenerateRequest, candidates: Sequence[Candidate], now: float) -> Decision:
        """Return who computes the request's prompt (and, aggregated, decodes it); `candidates` isn't empty.

        Resumed ids are computed too. Workers whose blocks differ in size are judged apart, then by their estimates.
        """
        groups: dict[int, list[Candidate]] = {}
        for one in candidates:
            groups.setdefault(one.config.block_size, []).append(one)
        num_tokens = len(request.token_ids) + len(request.resume)
        decisions = [
            self._routing(some[0].config).choose_prefill(
                num_tokens, self._hashes(request, block_size), some, now, home_of(request, some)
            )
            for block_size, some in groups.items()
        ]
        return min(decisions, key=lambda one: one.score)

    def stay_or_go(
        self, request: GenerateRequest, remote: Decision, decoders: Sequence[Candidate], *, hides_transfer: bool
    ) -> Decision:
        """Return who of these decode workers (not empty) computes the prompt where that is faster, else `remote`, which
        choose_prompt has just returned, with the reason why not. `hides_transfer`: the KV moves meanwhile."""
        if not remote.is_measured:
            return without_local(remote, "no estimate")
        config = decoders[0].config
        transfer = None if hides_transfer else self._transfer_cost(config.compat)
        num_tokens = len(request.token_ids) + len(request.resume)
        hashes = self._hashes(request, config.block_size)
        return self._routing(config).stay_or_go(num_tokens, hashes, remote, decoders, transfer)

    def estimate(self, request: GenerateRequest, decision: Decision, compat: str) -> Estimate | None:
        """Return how soon the request may be served at best; None: too little has been measured to say.
        `compat`: of the prefill worker whose KV has to be moved yet; "": the prompt is computed where it is decoded."""
        if decision.least_s is None:
            return None
        move_s = 0.0
        if compat and not decision.is_local:
            transfer = self._transfer_cost(compat)
            num_tokens = len(request.token_ids) + len(request.resume)
            move_s = self.local.handoff_s
            if transfer is not None:
                move_s += pass_s(transfer, min(num_tokens, transfer.max_tokens or num_tokens))
        return Estimate(prefill_s=decision.least_s, ttft_s=decision.least_s + move_s)

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
            decoder = None if config.role == "prefill" else config.worker_id
            self._under_way[request.attempt_id] = _UnderWay(routing, number, decoder)
            if decoder is not None:
                self._at_decoders.setdefault(decoder, {})[request.attempt_id] = number
            if len(self._under_way) > MAX_UNDER_WAY:
                self._under_way.popitem(last=False)

    def over(self, attempt_id: AttemptId) -> None:
        """The attempt's prompt is done, or nobody computes it; from events it is known what was cached of it."""
        one = self._under_way.pop(attempt_id, None)
        if one is not None:
            one.routing.prefilled(one.number)
            if one.decoder is not None:
                self._at_decoders.get(one.decoder, {}).pop(attempt_id, None)

    def _transfer_cost(self, compat: str) -> PrefillCost | None:
        """Return what fetching KV takes, by the decode worker that has fetched most often."""
        return max(self._transfers.get(compat, {}).values(), key=lambda one: one.num_passes, default=None)

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
