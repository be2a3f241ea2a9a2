"""The torch engine beside vLLM's CPU build, eager: same model, dtype and number of threads, in turns.

Decode: milliseconds a step, prefill: tokens a second; ratios above 1 say that busway's engine is that much faster.
`make bench ENGINE=vllm`; OMP_NUM_THREADS sets the threads of both (1).
"""

import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from deploy.bench.sides import Job, Opponent, opponent
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
            mine, other = _turns(ours, theirs, rounds, Job(kind="decode", num_tokens=context, batch=batch, steps=steps))
            row = {"ours_ms": mine * 1000, "vllm_ms": other * 1000, "ratio": other / mine}
            result[f"decode_{batch}x{context}"] = row
    for tokens in PROMPTS:
        mine, other = _turns(ours, theirs, rounds, Job(kind="prefill", num_tokens=tokens, steps=2))
        row = {"ours_tokens_s": tokens / mine, "vllm_tokens_s": tokens / other, "ratio": other / mine}
        result[f"prefill_{tokens}"] = row
    return result


def _turns(ours: Opponent, theirs: Opponent, rounds: int, job: Job) -> tuple[float, float]:
    """Return both sides' median seconds; a first turn of each is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, found in zip((ours, theirs), seconds, strict=True):
            spent = median(side.seconds(_salted(job, number)))
            found += [spent] if number else []
    return median(seconds[0]), median(seconds[1])


def _salted(job: Job, number: int) -> Job:
    """Return the job of one round: prompts that are computed must be new, contexts that are shared needn't be."""
    return msgspec.structs.replace(job, salt=number + job.num_tokens)
