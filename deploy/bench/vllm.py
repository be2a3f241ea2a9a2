"""The torch engine beside vLLM's CPU build, eager: same model, dtype and number of threads, in turns.

Decode: milliseconds a step, prefill: tokens a second; ratios above 1 say that busway's engine is that much faster
(cpu_ratio: by CPU time, which a busy machine disturbs less).
`make bench ENGINE=vllm`; OMP_NUM_THREADS sets the threads of both (1).
"""

import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from deploy.bench.sides import Job, Opponent, Spent, opponent
from deploy.engine_python import engine_python
from deploy.models import fetch_model
from services.config import WorkerConfig

BATCHES = (1, 8, 24)
CONTEXTS = (128, 1024)
PROMPTS = (512, 1024)
AIM = {"decode": 0.9, "prefill": 0.85}
VLLM_ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def run(quick: bool = False) -> dict[str, Any]:
    """Return what ran, and for each decode_{batch}x{context} and prefill_{tokens} both figures and their ratio.

    Raises RuntimeError when vLLM's environment isn't there.
    """
    python = engine_python(WorkerConfig(engine="vllm"))
    if python is None:
        raise RuntimeError("no environment for vllm: run deploy/engines/install.sh vllm")
    folder = str(fetch_model())
    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
    with opponent([sys.executable, "-m", "deploy.bench.torch_side", folder], environ) as ours:
        source = {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [str(python), "-m", "deploy.bench.vllm_side", folder, ours.facts["dtype"]]
        with opponent(command, environ | VLLM_ENVIRON | source) as theirs:
            return _measure(ours, theirs, quick)


def _measure(ours: Opponent, theirs: Opponent, quick: bool) -> dict[str, Any]:
    for facts in (ours.facts, theirs.facts):
        Console().print("{engine}, {dtype}, threads: {threads}".format(**facts))
    rounds, steps = (2, 6) if quick else (5, 16)
    result: dict[str, Any] = {"ours": ours.facts, "vllm": theirs.facts, "aim": AIM}
    for context in CONTEXTS:
        for batch in BATCHES:
            job = Job(kind="decode", num_tokens=context, batch=batch, steps=steps)
            mine, other = _turns(ours, theirs, rounds, job)
            row = {"ours_ms": mine.wall_s * 1000, "vllm_ms": other.wall_s * 1000}
            result[f"decode_{batch}x{context}"] = row | _ratios(mine, other)
    for tokens in PROMPTS:
        mine, other = _turns(ours, theirs, rounds, Job(kind="prefill", num_tokens=tokens, steps=2))
        row = {"ours_tokens_s": tokens / mine.wall_s, "vllm_tokens_s": tokens / other.wall_s}
        result[f"prefill_{tokens}"] = row | _ratios(mine, other)
    return result


def _ratios(mine: Spent, other: Spent) -> dict[str, float]:
    return {"ratio": other.wall_s / mine.wall_s, "cpu_ratio": other.cpu_s / mine.cpu_s}


def _turns(ours: Opponent, theirs: Opponent, rounds: int, job: Job) -> tuple[Spent, Spent]:
    """Return both sides' medians; a first turn of each, which may compute contexts, is not counted."""
    found: tuple[list[Spent], list[Spent]] = ([], [])
    for number in range(rounds + 1):
        for side, spent in zip((ours, theirs), found, strict=True):
            middle = _median(side.spent(_salted(job, number)))
            spent += [middle] if number else []
    return _median(found[0]), _median(found[1])


def _median(spent: list[Spent]) -> Spent:
    return Spent(*(median(column) for column in zip(*spent, strict=True)))


def _salted(job: Job, number: int) -> Job:
    """Return the job of one round: prompts to be computed must be new, contexts are the same ones again."""
    return msgspec.structs.replace(job, salt=job.num_tokens + (number if job.kind == "prefill" else 0))
