"""The router in a replay: the live router's policy, index and load book, fed late, as the bus would.

What it knows comes as messages with a delay: KV events, load reports, prefill results. Its own dispatches it knows at
once.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Literal

import msgspec
import numpy as np

from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from schemas.ids import Epoch, WorkerId
from schemas.kv_events import KvChange, KvRemoved, KvStored
from schemas.worker import LoadReport, PrefillCost, RuntimeConfig
from services.config import PolicyName
from services.prefix_hash import BlockHashes
from services.router.candidates import Candidate
from services.router.kv_feed import names_of
from services.router.kv_policy import KvPolicy, KvSettings
from services.router.kv_routing import KvMemory, KvRouting
from services.router.loads import LoadBook
from services.router.policies import Picker

ReplayPolicy = Literal["round_robin", "least_loaded", "kv"]
EPOCH = Epoch(1)
NO_BLOCKS: BlockHashes = np.empty(0, dtype=np.uint64)


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer`: what decode workers would have measured of their fetches (None: nothing to speak of)."""

    policy: ReplayPolicy = "kv"
    kv: KvSettings = KvSettings()
    memory: KvMemory = KvMemory()
    seed: int = 0
    transfer: PrefillCost | None = None


class RouterSide:
    """Chooses workers by number among `prefill` and `decode`; counts what it believed against what came."""

    def __init__(
        self, settings: RouterSettings, prefill: list[RuntimeConfig], decode: list[RuntimeConfig], outcome: Outcome
    ) -> None:
        self.book = LoadBook(EPOCH)
        self._outcome = outcome
        self._transfer = settings.transfer
        self.keeps_prompts_on_decode = settings.policy == "kv" and settings.kv.local.is_on
        self._configs: dict[str, list[RuntimeConfig]] = {"prefill": prefill, "decode": decode}
        self._numbers = {config.worker_id: index for side in (prefill, decode) for index, config in enumerate(side)}
        self._kv: KvRouting | None = None
        if settings.policy == "kv":
            policy = KvPolicy(settings.kv, random.Random(settings.seed))
            self._kv = KvRouting(policy, prefill[0].block_size, settings.memory)
        name: PolicyName = "round_robin" if settings.policy == "kv" else settings.policy
        self._picker = Picker(name)
        self._inbox: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    @property
    def num_indexed_blocks(self) -> int:
        """Blocks that the index knows."""
        return self._kv.index.num_blocks if self._kv is not None else 0

    def tell(self, due: float, message: Callable[[], None]) -> None:
        """A message is on its way to the router."""
        heapq.heappush(self._inbox, (due, next(self._order), message))

    def hear(self, now: float) -> None:
        """Take the messages that have come by now."""
        while self._inbox and self._inbox[0][0] <= now:
            heapq.heappop(self._inbox)[2]()

    def choose_prefill(self, job: Job, now: float) -> int:
        """Return the number of the worker that computes the prompt, and count the dispatch; a decode worker's when
        the prompt stays there (`job.is_local`)."""
        candidates = self._candidates("prefill", now)
        number = self.book.next_number()
        if self._kv is None:
            worker = self._picker.pick("prefill", candidates).config.worker_id
        else:
            decision = self._kv.choose_prefill(job.num_tokens, job.hashes, candidates, now)
            if self.keeps_prompts_on_decode:
                decoders = self._candidates("decode", now)
                decision = self._kv.stay_or_go(job.num_tokens, job.hashes, decision, decoders, self._transfer)
            worker, job.is_local = decision.worker, decision.is_local
            self._outcome.num_local += job.is_local
            config = self._configs["decode" if job.is_local else "prefill"][self._numbers[worker]]
            capacity = config.total_kv_blocks * config.block_size
            self._kv.dispatched(number, decision, job.hashes, capacity, now)
            job.expected_cached = decision.bid.cached_tokens
            job.expected_at = now + decision.score
            self._outcome.overlaps_missed.append(decision.choice.best_overlap_tokens - decision.bid.cached_tokens)
        job.dispatch = number
        self.book.add(worker, number, job.num_tokens - job.expected_cached, now, kv_tokens=job.num_tokens)
        return self._numbers[worker]

    def choose_decode(self, job: Job, now: float) -> int:
        """Return the number of the worker that decodes, and count the dispatch."""
        candidates = self._candidates("decode", now)
        if self._kv is None:
            worker = self._picker.pick("decode", candidates).config.worker_id
        else:
            worker = self._kv.choose_decode(job.num_tokens, candidates, {}).worker
        job.decode_dispatch = self.book.next_number()
        self.book.add(worker, job.decode_dispatch, 0, now, kv_tokens=job.num_tokens)
        return self._numbers[worker]

    def on_events(self, worker: WorkerId, removed: BlockHashes, stored: BlockHashes) -> None:
        """A worker's cache changed."""
        if self._kv is not None:
            self._kv.index.removed(worker, removed)
            self._kv.index.stored(worker, stored)

    def on_changes(self, worker: WorkerId, changes: tuple[KvChange, ...]) -> None:
        """A worker's cache changed, step by step."""
        for change in changes:
            if isinstance(change, KvStored):
                self.on_events(worker, NO_BLOCKS, names_of(change.blocks))
            elif isinstance(change, KvRemoved):
                self.on_events(worker, names_of(change.blocks), NO_BLOCKS)
            elif self._kv is not None:
                self._kv.cleared(worker)

    def on_report(self, report: LoadReport, now: float) -> None:
        self.book.report(report, now)

    def on_stayed(self, job: Job) -> None:
        """A prompt that stayed on decode is computed, as the worker's next report would show."""
        if self._kv is not None:
            self._kv.prefilled(job.dispatch)

    def on_prefilled(self, job: Job) -> None:
        if self._kv is not None:
            self._kv.prefilled(job.dispatch)
            self._outcome.estimate_errors_s.append(job.prefilled_at - job.expected_at)

    def _candidates(self, side: Literal["prefill", "decode"], now: float) -> list[Candidate]:
        load = self.book.load
        return [Candidate(config=config, load=load(config.worker_id, now)) for config in self._configs[side]]
