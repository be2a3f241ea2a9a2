"""Prefixes that were routed to a worker, remembered for a while. Pure: no clock, `now` is passed.

Two uses: the approximate mode, for engines that publish no KV events (what was sent there is cached there until a
time to live has passed); and, beside events, the prefixes of requests that still wait for their prefill, which are
as good as cached on that worker for whoever comes behind them in its queue.
"""

from collections import OrderedDict

import msgspec

from schemas.ids import WorkerId
from services.prefix_hash import BlockHashes
from services.router.holder_sets import Bits


class _Routed(msgspec.Struct, frozen=True):
    worker: WorkerId
    hashes: BlockHashes
    expires_at: float


class RoutedPrefixes:
    """Routed prompts by a key of the caller's, each until it is settled, its time has come, or `max_blocks` is passed
    (then the one routed longest ago goes first). A block is held as long as one routed prompt on that worker has it.
    """

    def __init__(self, max_blocks: int, *, ttl_s: float) -> None:
        self._bits = Bits()
        self._masks: dict[int, int] = {}
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._routed: OrderedDict[int, _Routed] = OrderedDict()
        self._counts: dict[WorkerId, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._routed)

    def note(self, key: int, worker: WorkerId, hashes: BlockHashes, now: float) -> None:
        """A prompt of these blocks goes to the worker; `key` is new. `now` never goes back."""
        self._routed[key] = _Routed(worker, hashes, now + self._ttl_s)
        self._num_blocks += len(hashes)
        counts, masks, bit = self._counts.setdefault(worker, {}), self._masks, self._bits.enrol(worker)
        for one in hashes.tolist():
            counts[one] = counts.get(one, 0) + 1
            masks[one] = masks.get(one, 0) | bit
        while self._num_blocks > self._max_blocks:
            self.settle(next(iter(self._routed)))

    def settle(self, key: int) -> None:
        """The prompt needs no remembering any more; idempotent."""
        routed = self._routed.pop(key, None)
        if routed is None:
            return
        self._num_blocks -= len(routed.hashes)
        counts, masks, bit = self._counts.get(routed.worker, {}), self._masks, self._bits.bit(routed.worker)
        for one in routed.hashes.tolist():
            counts[one] -= 1
            if not counts[one]:
                del counts[one]
                masks[one] &= ~bit
                if not masks[one]:
                    del masks[one]
        if not counts:
            self._counts.pop(routed.worker, None)

    def expire(self, now: float) -> None:
        """Settle the prompts whose time has come."""
        while self._routed:
            key, oldest = next(iter(self._routed.items()))
            if oldest.expires_at > now:
                return
            self.settle(key)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for key in [key for key, one in self._routed.items() if one.worker == worker]:
            self.settle(key)
        self._bits.free(worker)

    def match(self, hashes: BlockHashes) -> dict[WorkerId, int]:
        """As PrefixIndex.match."""
        found: dict[WorkerId, int] = {}
        active, depth = -1, 0
        for one in hashes.tolist():
            still = active & self._masks.get(one, 0)
            if still != active:
                if depth:
                    found.update(dict.fromkeys(self._bits.workers(active & ~still), depth))
                active = still
                if not active:
                    return found
            depth += 1
        if depth:
            found.update(dict.fromkeys(self._bits.workers(active), depth))
        return found
