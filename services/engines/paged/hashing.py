"""The names of KV blocks: chained SHA-256 over token ids.

A block's hash covers its own ids and all before it, and the request's cache salt, so equal hashes mean equal KV. It
is cryptographic because a collision would serve another tenant's KV.
"""

from array import array
from hashlib import sha256

BlockHash = bytes


def root_hash(cache_salt: str) -> BlockHash:
    """Return the parent of a sequence's first block."""
    return sha256(b"busway.kv.v1\0" + cache_salt.encode()).digest()


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` doesn't name yet."""
    done, full = len(hashes), len(token_ids) // block_size
    if done >= full:
        return
    packed = array("I", token_ids[done * block_size : full * block_size]).tobytes()
    width = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(packed), width):
        parent = sha256(parent + packed[start : start + width]).digest()
        hashes.append(parent)
