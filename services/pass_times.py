"""How long a worker's prefill passes take: a quadratic in their tokens, fitted to the passes themselves. Pure.

Ordinary least squares of seconds on (1, n, n^2) with forgetting, so that the fit follows a machine that gets slower.
Without enough different sizes the quadratic, then the constant, is left out: two passes of one size say nothing else.
"""

import numpy as np

from schemas.worker import PrefillCost

FORGET = 0.998
"""Weight of a pass against the one after it: about the last 500 passes count."""

SCALE_TOKENS = 4096.0
"""Sizes are fitted in units of this, so that the three features are of one order."""

MIN_SPREAD = 0.02
"""Least relative spread of sizes from which a slope is read."""


class PassTimes:
    """Notes passes; `cost` is the fit so far (None before the first pass)."""

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._num_passes = 0
        self._cost: PrefillCost | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A pass of so many prompt tokens, and nothing else of weight, took so long."""
        self._num_passes, self._cost = self._num_passes + 1, None
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
        for terms in ((0, 1, 2), (0, 1), (1,)):
            if len(terms) > 1 and self._is_degenerate(len(terms)):
                continue
            solved = np.linalg.solve(self._moments[np.ix_(terms, terms)], self._target[list(terms)])
            found = dict(zip(terms, solved.tolist(), strict=True))
            if min(found.values()) >= 0.0:
                return self._of(found)
        return self._of({0: float(self._target[0] / self._moments[0, 0])})

    def _of(self, factors: dict[int, float]) -> PrefillCost:
        return PrefillCost(
            num_passes=self._num_passes,
            base_s=factors.get(0, 0.0),
            token_s=factors.get(1, 0.0) / SCALE_TOKENS,
            token2_s=factors.get(2, 0.0) / SCALE_TOKENS**2,
        )

    def _is_degenerate(self, num_terms: int) -> bool:
        """Whether the sizes seen can't tell that many terms apart: the moments' determinant, made free of scale."""
        part = self._moments[:num_terms, :num_terms]
        scale = np.prod(np.diag(part))
        return bool(np.linalg.det(part) <= MIN_SPREAD ** (num_terms * (num_terms - 1)) * scale)
