"""Prompts of word ids, which the sim model and the tiny Llama share."""

import random

from services.engines.sim.card import builtin_word_ids

_WORDS = builtin_word_ids()


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Return `length` ids; other salts have other first blocks."""
    rng = random.Random(salt * 1000 + 17)
    return tuple(rng.choice(_WORDS) for _ in range(length))
