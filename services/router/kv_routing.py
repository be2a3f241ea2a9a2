"""What the `kv` policy remembers of one model's workers, from events, reports and its own dispatches. Pure: no I/O, no
clock; the live router and the replay drive the same class.
"""

from collections.abc import Sequence
from operator import is_

import msgspec

from schemas.ids import WorkerId
from schemas.worker import PrefillCost
from services.prefix_hash import BlockHashes
from services.router.cache_age import CacheAge
from services.router.candidates import Candidate
from services.router.estimates import Standing, settled_cost
from services.router.kv_policy import Decision, KvPolicy, Prompt
from services.router.prefix_index import PrefixIndex
from services.router.routed_prefixes import RoutedPrefixes

_Known = dict[WorkerId, tuple[tuple[object, ...], Standing]]

ROUTED_BLOCKS = 1 << 20
"""Most blocks of prompts on their way (or, without events, remembered) that are kept."""


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`max_blocks`: cap of the index, 32 bytes each. `routed_ttl_s`: how long a routed prefix counts as cached on an
    engine without KV events, and the longest one that waits for its prefill counts on any."""

    max_blocks: int = 1 << 20
    routed_ttl_s: float = 120.0


class KvRouting:
    """The prefix index and what goes with it, for one model and block size."""

    def __init__(self, policy: KvPolicy, block_size: int, memory: KvMemory) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(memory.max_blocks)
        self._policy = policy
        self._routed = RoutedPrefixes(min(memory.max_blocks, ROUTED_BLOCKS), ttl_s=memory.routed_ttl_s)
        self._ages = CacheAge()
        self._known: _Known = {}
        self._known_local: _Known = {}
        self._most_experienced: PrefillCost | None = None
        self._asked: tuple[BlockHashes, Prompt] | None = None

    def choose_prefill(
        self,
        num_tokens: int,
        hashes: BlockHashes,
        candidates: Sequence[Candidate],
        now: float,
        session_worker: WorkerId | None = None,
    ) -> Decision:
        """Return who computes a prompt of these blocks; `candidates` isn't empty."""
        self._routed.expire(now)
        prompt = self._prompt(num_tokens, hashes, session_worker)
        self._asked = (hashes, prompt)
        self._most_experienced = _most_experienced(candidates)
        return self._policy.choose_prefill(prompt, self._standings(candidates, self._most_experienced, self._known))

    def stay_or_go(
        self,
        num_tokens: int,
        hashes: BlockHashes,
        remote: Decision,
        decoders: Sequence[Candidate],
        transfer: PrefillCost | None,
    ) -> Decision:
        """Return who of the decode workers (not empty) computes the prompt, if any should, else `remote`, which
        choose_prefill has just returned."""
        experienced = max(
            (one for one in (self._most_experienced, _most_experienced(decoders)) if one is not None),
            key=lambda one: one.num_passes,
            default=None,
        )
        standings = self._standings(decoders, experienced, self._known_local)
        hashes_asked, prompt = self._asked or (None, None)
        if prompt is None or hashes_asked is not hashes:
            prompt = self._prompt(num_tokens, hashes, None)
        return self._policy.stay_or_go(prompt, remote, standings, transfer)

    def choose_decode(self, num_tokens: int, candidates: Sequence[Candidate], source: dict[str, str]) -> Decision:
        """Return who decodes a prompt of so many tokens; `source`: the labels of the worker that has its KV."""
        standings = self._standings(candidates, _most_experienced(candidates), self._known)
        return self._policy.choose_decode(num_tokens, standings, source)

    def overlaps(self, hashes: BlockHashes) -> dict[WorkerId, int]:
        """Return each worker's leading blocks of a prompt, cached there or on their way."""
        found = self.index.match(hashes)
        for worker, depth in self._routed.match(hashes).items():
            if depth > found.get(worker, 0):
                found[worker] = depth
        return found

    def dispatched(
        self, number: int, decision: Decision, hashes: BlockHashes, capacity_tokens: int, now: float
    ) -> None:
        """A prompt goes to the chosen worker; `number` names it until `prefilled`."""
        self._routed.note(number, decision.worker, hashes, now)
        self._ages.placed(decision.worker, decision.bid.uncached_tokens, capacity_tokens, now)

    def prefilled(self, number: int) -> None:
        """That prompt is done, or never will be; the worker's events have told what it cached. Idempotent.

        Not to be called for an engine without events: there the routed prefix is all that is known.
        """
        self._routed.settle(number)

    def cleared(self, worker: WorkerId) -> None:
        """The worker's cache is empty now."""
        self.index.cleared(worker)
        self._ages.forget(worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self.index.forget(worker)
        self._routed.forget(worker)
        self._known.pop(worker, None)
        self._known_local.pop(worker, None)
        self._ages.forget(worker)

    def _prompt(self, num_tokens: int, hashes: BlockHashes, session_worker: WorkerId | None) -> Prompt:
        return Prompt(
            num_tokens=num_tokens,
            block_size=self.block_size,
            overlaps=self.overlaps(hashes),
            session_worker=session_worker,
        )

    def _standings(
        self, candidates: Sequence[Candidate], most_experienced: PrefillCost | None, known: _Known
    ) -> list[Standing]:
        return [self._standing(one, most_experienced, known) for one in candidates]

    def _standing(self, candidate: Candidate, most_experienced: PrefillCost | None, all_known: _Known) -> Standing:
        """A standing that only its load changes is made once per load: the book hands out the same one until then."""
        config, load = candidate.config, candidate.load
        oldest_at = self._ages.oldest_at(config.worker_id)
        key = (load, config, oldest_at, most_experienced)
        known = all_known.get(config.worker_id)
        if known is not None and all(map(is_, known[0], key)):
            return known[1]
        standing = Standing(
            worker=config.worker_id,
            queued_tokens=max(0, load.queued_tokens - load.pass_tokens),
            pass_rest_s=load.pass_rest_s,
            cost=settled_cost(load.prefill_cost, most_experienced),
            is_measured=load.prefill_cost is not None or most_experienced is not None,
            max_batched_tokens=config.max_batched_tokens,
            held_tokens=load.kv_blocks * config.block_size + load.coming_tokens,
            capacity_tokens=config.total_kv_blocks * config.block_size,
            requests=load.requests,
            oldest_at=oldest_at,
            labels=config.labels,
        )
        all_known[config.worker_id] = (key, standing)
        return standing


def _most_experienced(candidates: Sequence[Candidate]) -> PrefillCost | None:
    costs = [one.load.prefill_cost for one in candidates if one.load.prefill_cost is not None]
    return max(costs, key=lambda one: one.num_passes, default=None)
