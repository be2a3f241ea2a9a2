"""The names of prompt blocks outside engines: chained XXH3-64 over token ids, salted.

A block's hash covers its own ids, all before it (the parent's hash is the seed) and the cache salt. 64 bits without
cryptography: good enough to choose a worker, where a collision costs one bad choice; engines never share KV by it
(services/engines/paged/hashing.py).
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

BlockHashes = npt.NDArray[np.uint64]


def root_hash(cache_salt: str) -> int:
    """Return the parent of a prompt's first block; another salt, another root."""
    return xxh3_64_intdigest(b"busway.prefix.v1\0" + cache_salt.encode())


def chain(parent: int, token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int) -> list[int]:
    """Return the hashes of the full blocks of `token_ids`, which follow the block named `parent`."""
    full = len(token_ids) // block_size
    packed = (token_ids if isinstance(token_ids, np.ndarray) else array("I", token_ids)).tobytes()
    width = 4 * block_size
    hashes = []
    for start in range(0, full * width, width):
        parent = xxh3_64_intdigest(packed[start : start + width], parent)
        hashes.append(parent)
    return hashes


def block_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, cache_salt: str = ""
) -> BlockHashes:
    """Return the hashes of a prompt's full blocks, in order: uint64 [len(token_ids) // block_size]."""
    return np.array(chain(root_hash(cache_salt), token_ids, block_size), dtype=np.uint64)
