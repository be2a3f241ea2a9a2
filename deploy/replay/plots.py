"""Distributions and loads as text: block characters, one line each, so that a terminal is enough."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEVELS = " ▁▂▃▄▅▆▇█"
EDGE = 2**0.5


def bars(values: npt.NDArray[np.float64]) -> str:
    """Return one character a value, its height in proportion to the largest; anything above 0 is visible."""
    top = float(values.max(initial=0.0))
    if top <= 0:
        return " " * len(values)
    heights = np.ceil(values / top * (len(LEVELS) - 1)).astype(int)
    return "".join(LEVELS[height] for height in heights.tolist())


def distribution(values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64] | None = None) -> list[str]:
    """Return a histogram over logarithmic bins (each √2 wide), with the range of its bars."""
    positive = np.maximum(values, 1e-3)
    if not len(positive):
        return ["no values"]
    low, high = (int(np.floor(np.log(one) / np.log(EDGE))) for one in (positive.min(), positive.max()))
    edges = EDGE ** np.arange(low, high + 2)
    counts, _ = np.histogram(positive, bins=edges, weights=weights)
    return [f"{bars(counts.astype(np.float64))}  {edges[0]:,.3g} … {edges[-1]:,.3g} ms, bars √2 wide"]


def over_time(names: Sequence[str], samples: npt.NDArray[np.float64], end_s: float, unit: str) -> list[str]:
    """Return a line a worker of its load over time, all to one scale. `samples`: [workers, times]."""
    top = float(samples.max(initial=0.0))
    width = max(map(len, names), default=0)
    lines = []
    for name, row in zip(names, samples, strict=True):
        scaled = np.append(row, top)
        lines.append(f"{name:<{width}} {bars(scaled)[:-1]}  mean {row.mean():,.0f}")
    return [*lines, f"{'':<{width}} 0 … {end_s:,.0f} s; full height: {top:,.0f} {unit}"]
