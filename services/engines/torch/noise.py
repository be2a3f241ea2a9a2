"""Positional noise: a Gumbel variate for each vocabulary id that depends on (seed, position, id) and nothing else.

Adding it to log-probabilities and taking the maximum draws from the distribution (the Gumbel-max trick). So a token
drawn is the same in any batch, after any filter that keeps it, and on any worker that continues the request.
"""

import torch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def noise_key(seed: int, position: int) -> int:
    """Return the 64-bit key of a draw, as a signed integer."""
    return _signed(_mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN))


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return float64 standard Gumbel noise; int64 `keys` [n, 1] and `ids` [n or 1, m] broadcast."""
    bits = keys + (ids + 1) * _signed(GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(MIX_2)
    bits = bits ^ _shifted(bits, 31)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # in (0, 1), never its ends
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right, filling with zeros (torch's shift of int64 repeats the sign)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
