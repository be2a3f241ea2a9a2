"""A replay as a person reads it: a table of policies, distributions, loads over time."""

import resource
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deploy.replay.outcome import Outcome, as_json
from deploy.replay.plots import distribution, over_time

NUM_SLICES = 72
MAX_WORKERS_SHOWN = 16


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's replay, the seconds and CPU seconds it took, and the most memory the process had had by its end."""

    policy: str
    outcome: Outcome
    wall_s: float
    cpu_s: float
    peak_mib: float


def run_json(run: Run) -> dict[str, Any]:
    """Return a run for programs."""
    return {
        "policy": run.policy,
        **as_json(run.outcome),
        "wall_s": round(run.wall_s, 2),
        "peak_mib": round(run.peak_mib),
    }


def peak_mib() -> float:
    """Return the most memory this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_runs(console: Console, title: str, runs: Sequence[Run]) -> None:
    """Print the table of all runs, then each run's plots."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("policy", "TTFT ms", "p50", "p99", "ITL ms", "p99", "reuse", "requests"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for run in runs:
        ttft, itl = run.outcome.ttft(), run.outcome.itl()
        table.add_row(
            run.policy,
            *(_ms(value) for value in (ttft.mean, ttft.p50, ttft.p99, itl.mean, itl.p99)),
            f"{run.outcome.prefix_reuse:.3f}",
            f"{run.outcome.num_done:,}",
        )
    console.print(table)
    for run in runs:
        took = f"{run.wall_s:,.1f} s ({run.cpu_s:,.1f} s of CPU), {run.peak_mib:,.0f} MiB"
        console.print(f"{run.policy}: {run.outcome.end_s:,.0f} s of trace in {took}", highlight=False)
    if any(run.outcome.num_refused for run in runs):
        console.print(f"{runs[0].outcome.num_refused:,} requests refused: larger than a worker's pool")
    for run in runs:
        if run.outcome.num_local:
            console.print(f"{run.policy}: {run.outcome.num_local:,} prompts stayed on decode workers")
    for run in runs:
        for line in plot_lines(run):
            console.print(line, highlight=False, soft_wrap=True)


def _ms(value: float) -> str:
    if value >= 1e5:
        return f"{value / 1e3:,.0f} s"
    return f"{value:,.0f}" if value >= 1e4 else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def plot_lines(run: Run) -> list[str]:
    """Return a run's plots as lines."""
    outcome = run.outcome
    lines = ["", f"{run.policy}: TTFT", *distribution(outcome.ttft_ms())]
    lines += [f"{run.policy}: ITL", *distribution(outcome.gap_ms(), outcome.gap_weights())]
    for role, unit in (("prefill", "tokens queued"), ("decode", "tokens held")):
        names = [name for name in outcome.loads if name.startswith(role)]
        names.sort(key=lambda name: (len(name), name))
        if names:
            shown = names[:MAX_WORKERS_SHOWN]
            samples = np.array([outcome.loads[name].means(outcome.end_s, NUM_SLICES) for name in shown])
            rest = f", the first {len(shown)} of {len(names)}" if len(shown) < len(names) else ""
            lines += [f"{run.policy}: {role} load over time{rest}", *over_time(shown, samples, outcome.end_s, unit)]
    return lines
