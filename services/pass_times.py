"""How long a worker's prefill passes take: a quadratic in their tokens, fitted to the passes themselves. Pure.

Ordinary least squares of seconds on (1, n, n^2) with forgetting, so that the fit follows a machine that gets slower.
Terms that would be negative, or that the sizes seen can't tell apart, are left out.
"""

import numpy as np

from schemas.worker import PrefillCost

FORGET = 0.998
"""Weight of a pass against the one after it: about the last 500 passes count."""

SCALE_TOKENS = 4096.0
"""Sizes are fitted in units of this, so that the three features are of one order."""

MIN_SPREAD = 0.02
"""Least relative spread of sizes from which a slope is read."""


FEWER_TERMS = ((0, 1), (0, 2), (1, 2), (1,), (2,), (0,))


class PassTimes:
    """Notes passes; `cost` is the fit so far (None before the first pass)."""

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._num_passes = 0
        self._max_tokens = 0
        self._cost: PrefillCost | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A pass of so many prompt tokens, and nothing else of weight, took so long."""
        self._num_passes, self._cost = self._num_passes + 1, None
        self._max_tokens = max(self._max_tokens, num_tokens)
        size = num_tokens / SCALE_TOKENS
        features = np.array((1.0, size, size * size))
        self._moments = FORGET * self._moments + np.outer(features, features)
        self._target = FORGET * self._target + seconds * features

    def cost(self) -> PrefillCost | None:
        """Return the fit; never negative anywhere."""
        if self._cost is None and self._num_passes:
            self._cost = self._fit()
        return self._cost

    def _fit(self) -> PrefillCost:
        """Return the best fit without negative terms: that of all three if it is one, else the best of fewer."""
        whole = self._solve((0, 1, 2))
        if whole is not None:
            return self._of(whole)
        fits = [found for terms in FEWER_TERMS if (found := self._solve(terms)) is not None]
        return self._of(min(fits, key=self._misfit))

    def _solve(self, terms: tuple[int, ...]) -> dict[int, float] | None:
        """Return the least squares over some of the terms; None when the sizes can't tell them apart, or when
        one is negative."""
        if len(terms) > 1 and self._is_degenerate(terms):
            return None
        solved = np.linalg.solve(self._moments[np.ix_(terms, terms)], self._target[list(terms)])
        return dict(zip(terms, solved.tolist(), strict=True)) if (solved >= 0).all() else None

    def _misfit(self, found: dict[int, float]) -> float:
        """Return the sum of squared errors, less what is the same for every fit."""
        factors = np.array([found.get(term, 0.0) for term in range(3)])
        return float(factors @ self._moments @ factors - 2 * factors @ self._target)

    def _of(self, factors: dict[int, float]) -> PrefillCost:
        return PrefillCost(
            num_passes=self._num_passes,
            max_tokens=self._max_tokens,
            base_s=factors.get(0, 0.0),
            token_s=factors.get(1, 0.0) / SCALE_TOKENS,
            token2_s=factors.get(2, 0.0) / SCALE_TOKENS**2,
        )

    def _is_degenerate(self, terms: tuple[int, ...]) -> bool:
        """Whether the sizes seen can't tell these terms apart: the moments' determinant, made free of scale."""
        part = self._moments[np.ix_(terms, terms)]
        scale = np.prod(np.diag(part))
        return bool(np.linalg.det(part) <= MIN_SPREAD ** (len(terms) * (len(terms) - 1)) * scale)
