"""What a replay measured: times of first tokens and gaps, prefix reuse, and load over time."""

from array import array
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from deploy.replay.jobs import Job

Floats = npt.NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    mean: float
    p50: float
    p99: float


class LoadOverTime:
    """A worker's load, each change weighted by how long it lasted: mean per slice of time."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("d")

    def note(self, now: float, value: float) -> None:
        """The load is `value` from now on."""
        self.times.append(now)
        self.values.append(value)

    def means(self, end_s: float, num_slices: int) -> Floats:
        """Return the mean load of each slice of [0, end_s): float64 [num_slices]."""
        if not len(self.times) or end_s <= 0:
            return np.zeros(num_slices)
        edges = np.linspace(0.0, end_s, num_slices + 1)
        times = np.append(np.array(self.times), np.inf)
        values = np.array(self.values)
        total = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(times[:-1]))))
        index = np.searchsorted(times, edges, side="right") - 1
        inside = np.where(index < 0, 0.0, total[index] + values[index] * (edges - times[np.maximum(index, 0)]))
        return np.diff(inside) / np.diff(edges)


class Outcome:
    """Collects while a replay runs. Gaps are kept as (seconds, how many): a pass gives all its members the same."""

    def __init__(self) -> None:
        self.num_done = 0
        self.num_refused = 0
        self.num_local = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.end_s = 0.0
        self._ttft_s = array("d")
        self._e2e_s = array("d")
        self._gap_s = array("d")
        self._gap_weights = array("q")
        self.estimate_errors_s = array("d")
        self.overlaps_missed = array("q")
        self.loads: dict[str, LoadOverTime] = {}

    def load(self, worker: str, now: float, value: float) -> None:
        """A worker's load changed: tokens queued for prefill, or tokens held by a decode worker."""
        self.loads.setdefault(worker, LoadOverTime()).note(now, value)

    def first_token(self, job: Job, now: float) -> None:
        """A request's first token left, or the first one after it was preempted."""
        if job.first_token_s < 0:
            job.first_token_s = now - job.request.arrival_s
            self._ttft_s.append(job.first_token_s)
        else:
            self._gap_s.append(now - job.last_token_at)
            self._gap_weights.append(1)

    def gaps(self, seconds: float, count: int) -> None:
        """So many requests waited so long for their next token."""
        if count:
            self._gap_s.append(seconds)
            self._gap_weights.append(count)

    def prefilled(self, job: Job) -> None:
        """A prompt was computed."""
        self.num_prompt_tokens += job.num_tokens
        self.num_cached_tokens += job.num_cached

    def finished(self, job: Job, now: float) -> None:
        """A request's last token left."""
        self.num_done += 1
        self.end_s = max(self.end_s, now)
        self._e2e_s.append(now - job.request.arrival_s)

    @property
    def prefix_reuse(self) -> float:
        """Prompt tokens not computed, as a share of all."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def ttft(self) -> Spread:
        return spread(self.ttft_ms())

    def itl(self) -> Spread:
        return spread(self.gap_ms(), np.frombuffer(self._gap_weights, dtype=np.int64))

    def e2e(self) -> Spread:
        return spread(np.array(self._e2e_s) * 1e3)

    def ttft_ms(self) -> Floats:
        return np.array(self._ttft_s) * 1e3

    def gap_ms(self) -> Floats:
        return np.array(self._gap_s) * 1e3

    def gap_weights(self) -> npt.NDArray[np.int64]:
        return np.array(self._gap_weights, dtype=np.int64)


def spread(values: Floats, weights: npt.NDArray[np.int64] | None = None) -> Spread:
    """Return mean and percentiles (nearest rank) of values, each counted `weights` times."""
    if not len(values):
        return Spread(mean=0.0, p50=0.0, p99=0.0)
    counts = np.ones(len(values), dtype=np.int64) if weights is None else weights
    order = np.argsort(values)
    ranks = np.cumsum(counts[order])
    p50, p99 = (float(values[order[np.searchsorted(ranks, share * ranks[-1])]]) for share in (0.5, 0.99))
    return Spread(mean=float(np.average(values, weights=counts)), p50=p50, p99=p99)


def rounded(spread: Spread) -> dict[str, float]:
    """Return a spread for JSON."""
    return {key: round(value, 4) for key, value in msgspec.structs.asdict(spread).items()}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the figures for programs."""
    errors_ms = np.abs(np.array(outcome.estimate_errors_s)) * 1e3
    return {
        "ttft_ms": rounded(outcome.ttft()),
        "itl_ms": rounded(outcome.itl()),
        "e2e_ms": rounded(outcome.e2e()),
        "prefix_reuse": round(outcome.prefix_reuse, 4),
        "requests": outcome.num_done,
        "refused": outcome.num_refused,
        "stayed_on_decode": outcome.num_local,
        "estimate_error_ms": rounded(spread(errors_ms)),
        "overlap_given_up_tokens": float(np.mean(outcome.overlaps_missed)) if outcome.overlaps_missed else 0.0,
        "virtual_s": round(outcome.end_s, 3),
    }
