"""The sim model's arithmetic: a rolling 64-bit state instead of attention, exact under any chunking.

The state after position p is s(p) = s(p-1)·M + f(t(p-1))·N + f(t(p)) modulo 2^64. Both s(p-1) and t(p-1) are read
from the KV, so a wrong row changes everything after it. Being linear in s, a whole chunk is one cumulative sum.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

MASK = 2**64 - 1
_M = 0x9E3779B97F4A7C15
_N = 0xD1B54A32D192ED03
_M_INVERSE = pow(_M, -1, 2**64)
_SEED_TERM = 0x2545F4914F6CDD1D


def mix(x: int) -> int:
    """Return a 64-bit hash of x (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix_array(x: U64) -> U64:
    """As mix, for each element."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: U64 = x ^ (x >> np.uint64(31))
    return result


@lru_cache(maxsize=1 << 16)
def _embed(token_id: int) -> int:
    return mix(token_id)


def next_state(state: int, previous_id: int | None, token_id: int) -> int:
    """Return the state after a token; `state` and `previous_id` are the row before it (0 and None at position 0)."""
    term = _SEED_TERM if previous_id is None else _embed(previous_id) * _N
    return (state * _M + term + _embed(token_id)) & MASK


def next_states(state: int, previous_id: int | None, token_ids: U64) -> U64:
    """Return the states after each of several tokens [n]."""
    embedded = mix_array(token_ids)
    terms = embedded.copy()
    terms[1:] += embedded[:-1] * np.uint64(_N)
    first = _SEED_TERM if previous_id is None else _embed(previous_id) * _N
    terms[:1] += np.uint64((first + state * _M) & MASK)
    powers, inverses = _powers(len(token_ids))
    result: U64 = np.cumsum(terms * inverses, dtype=np.uint64) * powers
    return result


def position_weights(num_positions: int) -> U64:
    """Return an odd weight for each position, so that no row of a sum over all can be wrong or misplaced unseen."""
    result: U64 = mix_array(np.arange(num_positions, dtype=np.uint64)) | np.uint64(1)
    return result


_power_table: tuple[U64, U64] = (np.ones(1, dtype=np.uint64), np.ones(1, dtype=np.uint64))


def _powers(count: int) -> tuple[U64, U64]:
    """Return M^j and M^-j for j in [0, count)."""
    global _power_table
    if len(_power_table[0]) < count:
        size = 1 << (count - 1).bit_length()
        up, down = np.full(size, _M, dtype=np.uint64), np.full(size, _M_INVERSE, dtype=np.uint64)
        up[0] = down[0] = 1
        _power_table = (np.cumprod(up, dtype=np.uint64), np.cumprod(down, dtype=np.uint64))
    return _power_table[0][:count], _power_table[1][:count]
