"""Which blocks hold the KV of which tokens, and in which order unreferenced ones are given up (least recent first)."""

from collections import OrderedDict

from services.engines.paged.hashing import BlockHash


class PrefixCache:
    """Published blocks by hash. A block that nobody references is idle: still a hit, and the next to be evicted."""

    def __init__(self) -> None:
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}
        # Not a dict: the first key of a dict that loses its first keys is found by walking over the lost ones.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_by_block

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def match(self, hashes: list[BlockHash], max_blocks: int) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`, at most `max_blocks`."""
        found = []
        for block_hash in hashes[:max_blocks]:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Name a referenced block's KV; return whether it took the name. The first block of a hash keeps it; a later
        copy stays private."""
        if block_hash in self._block_by_hash or block_id in self._hash_by_block:
            return False
        self._block_by_hash[block_hash] = block_id
        self._hash_by_block[block_id] = block_hash
        return True

    def forget(self, block_id: int) -> bool:
        """Take a referenced block's name from it; return whether it had one."""
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is None:
            return False
        del self._block_by_hash[block_hash]
        return True

    def rest(self, block_id: int) -> None:
        """Note that a published block lost its last reference: it is the most recent idle one now."""
        self._idle[block_id] = None

    def wake(self, block_id: int) -> None:
        """Note that an idle block is referenced again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forget the least recent idle block and return it; raises KeyError when none is idle."""
        block_id = self._idle.popitem(last=False)[0]
        del self._block_by_hash[self._hash_by_block.pop(block_id)]
        return block_id
