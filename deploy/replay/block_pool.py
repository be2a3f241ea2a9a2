"""A prefill worker's blocks under Dynamo's rules: prefix hits, LRU over freed blocks, a prompt's tail evicted first.

Not services.engines.paged.blocks: that is our engine, this is theirs, so that policies are compared on equal terms
(facts: aisimulate/crates/engine/src scheduler/vllm/core.rs@269cc42c).
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks by hash, referenced (`held`) or not (`idle`, least recent first); private blocks are only counted.

    `stored` and `evicted` collect the hashes of blocks that came and went until someone takes them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.stored: list[int] = []
        self.evicted: list[int] = []
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return self.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and that are still known."""
        return len(self._idle)

    def keys(self) -> set[int]:
        """Return the hashes of all blocks known."""
        return {*self._held, *self._idle}

    def hold_prefix(self, hashes: Sequence[int], max_blocks: int) -> int:
        """Reference the longest cached prefix, at most `max_blocks`; return its length."""
        held, idle = self._held, self._idle
        count = 0
        for one in hashes[:max_blocks]:
            if one in held:
                held[one] += 1
            elif one in idle:
                del idle[one]
                held[one] = 1
            else:
                break
            count += 1
        return count

    def take(self, num_blocks: int) -> bool:
        """Take private blocks, evicting the least recent idle ones; with too few of both, none, and return False."""
        if num_blocks > self.num_available:
            return False
        num_evicted = max(0, num_blocks - self.num_free)
        for _ in range(num_evicted):
            self.evicted.append(self._idle.popitem(last=False)[0])
        self.num_free -= num_blocks - num_evicted
        return True

    def publish(self, hashes: Sequence[int]) -> list[bool]:
        """Give private blocks their hashes; return for each whether it took it (another block may have it already)."""
        held, idle = self._held, self._idle
        taken = []
        for one in hashes:
            is_new = one not in held and one not in idle
            if is_new:
                held[one] = 1
                self.stored.append(one)
            taken.append(is_new)
        return taken

    def release(self, hashes: Sequence[int], num_private: int) -> None:
        """Give up a prompt's blocks: its published ones, in order of position, and so many private ones."""
        held, idle = self._held, self._idle
        for one in reversed(hashes):
            if held[one] == 1:
                del held[one]
                idle[one] = None
            else:
                held[one] -= 1
        self.num_free += num_private
