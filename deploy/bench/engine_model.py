"""How long the torch engine's steps take: the engine model that `busway replay --engine-model torch` plays.

`python -m deploy.bench.engine_model FILE [--engine-arg k=v …]` writes the file; replay plays it by its path. Each step
is taken several times, all kinds in turns, and the least counts. With one thread (the default here) it is the thread's
CPU time: on a shared machine the rest of the wall's is somebody else's.
"""

import mmap
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console

from deploy.bench.kv_transfer import measure as measure_transfer
from deploy.models import fetch_model
from deploy.replay.engine_model import (
    TORCH_MODEL,
    DecodePoint,
    DecodeTimes,
    EngineModel,
    MeasuredSize,
    PrefillPoint,
    PrefillTimes,
    StepTimes,
    decode_features,
    fit,
    prefill_features,
    read_engine_model,
)
from schemas.ids import new_attempt_id
from schemas.request import Sampling
from services.engines.paged.runner import SampleSpec, Slice
from services.engines.torch.runner import TorchRunner

ENGINE_ARGS = {"device": "cpu", "threads": "1"}
MODEL = "smollm2-135m-instruct"
ROUNDS, QUICK_ROUNDS = 5, 1
PREFILL = [
    *([(length, start)] for length in (16, 64, 256, 512) for start in (0, 1024, 4096)),
    [(64, 0)] * 8,
    [(128, 0)] * 4,
    [(256, 1024)] * 2,
]
DECODE = [
    *([context] * batch for batch in (1, 4) for context in (64, 1024, 4096)),
    *([context] * batch for batch in (8, 16, 32) for context in (64, 512)),
    [4096, 64, 64, 64],
]
GREEDY = Sampling(seed=0, temperature=0.0)


class Measured:
    """A loaded runner and a pool whose contents don't matter: attention takes its time over any numbers."""

    def __init__(self, engine_args: dict[str, str]) -> None:
        self._runner = TorchRunner(fetch_model(), MODEL, engine_args)
        self.spec = self._runner.load(lambda num_bytes: memoryview(mmap.mmap(-1, num_bytes)))
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def step_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one step over chunks of (tokens, start), each of a sequence of its own."""
        slices, first = [], 0
        for length, start in chunks:
            num_blocks = -(-(start + length) // self.spec.layout.block_size)
            slices.append(_slice(length, start, list(range(first, first + num_blocks))))
            first += num_blocks
        if first > self.spec.num_blocks:
            raise RuntimeError(f"{first} KV blocks are needed, the pool has {self.spec.num_blocks}")
        began = self._clock()
        self._runner.execute(slices)
        return self._clock() - began


def measure(engine_args: dict[str, str], rounds: int) -> EngineModel:
    """Return the engine model of this machine.

    Steps run on a thread of their own, as the engine's do: glibc's main arena gives large temporaries back to the
    kernel each time, which would make them slower.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_measure, engine_args, rounds).result()


def _measure(engine_args: dict[str, str], rounds: int) -> EngineModel:
    engine = Measured(engine_args)
    steps = [*PREFILL, *([(1, context - 1) for context in contexts] for contexts in DECODE)]
    least = [min(turn) for turn in zip(*([engine.step_s(step) for step in steps] for _ in range(rounds)), strict=True)]
    prefill_points = list(zip(PREFILL, least[: len(PREFILL)], strict=True))
    decode_points = list(zip(DECODE, least[len(PREFILL) :], strict=True))
    times, prefill_misfit, decode_misfit = fitted(prefill_points, decode_points)
    spec = engine.spec
    return EngineModel(
        model=MODEL,
        engine=spec.engine_version,
        machine=machine(),
        date=datetime.now(UTC).date().isoformat(),
        dtype=spec.layout.dtype,
        threads=torch.get_num_threads(),
        size=MeasuredSize(
            num_blocks=spec.num_blocks,
            block_size=spec.layout.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_batched_tokens=spec.max_batched_tokens,
        ),
        kv_bytes_per_token=spec.layout.block_bytes // spec.layout.block_size,
        gb_per_s=max(measure_transfer("shm", num_blocks=128, rounds=5)["read_gb_per_s"] for _ in range(rounds)),
        times=times,
        prefill_misfit=prefill_misfit,
        decode_misfit=decode_misfit,
        prefill_points=prefill_points,
        decode_points=decode_points,
    )


def fitted(prefill: list[PrefillPoint], decode: list[DecodePoint]) -> tuple[StepTimes, float, float]:
    """Return the times that fit these points, and how badly they do: prefill's and decode's median relative error."""
    of_prefill, prefill_misfit = fit([prefill_features(chunks) for chunks, _ in prefill], [s for _, s in prefill])
    of_decode, decode_misfit = fit([decode_features(contexts) for contexts, _ in decode], [s for _, s in decode])
    times = StepTimes(
        prefill=PrefillTimes(base_s=of_prefill[0], token_s=of_prefill[1], pair_s=of_prefill[2]),
        decode=DecodeTimes(base_s=of_decode[0], sequence_s=of_decode[1], context_token_s=of_decode[2]),
    )
    return times, prefill_misfit, decode_misfit


def machine() -> str:
    """Say in words what this runs on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}, {platform.system()}"


def _slice(length: int, start: int, block_table: list[int]) -> Slice:
    ids = [(i * 7919) % 40000 + 100 for i in range(length)]
    spec = SampleSpec(sampling=GREEDY, position=start + length, history=ids, num_prompt_tokens=length)
    return Slice(attempt_id=new_attempt_id(), token_ids=ids, start=start, block_table=block_table, sample=spec)


def summary(model: EngineModel) -> dict[str, Any]:
    """Return the figures that a person wants to see."""
    prefill, decode = model.times.prefill, model.times.decode
    return {
        "prefill": {
            "base_ms": prefill.base_s * 1e3,
            "ms_per_token": prefill.token_s * 1e3,
            "misfit": model.prefill_misfit,
        },
        "decode": {
            "base_ms": decode.base_s * 1e3,
            "ms_per_sequence": decode.sequence_s * 1e3,
            "us_per_context_token": decode.context_token_s * 1e6,
            "misfit": model.decode_misfit,
        },
        "transfer_gb_per_s": model.gb_per_s,
    }


def text_of(model: EngineModel) -> str:
    """Return the file's text, a point a line."""
    text = msgspec.json.format(msgspec.json.encode(model)).decode()
    for name in ("prefill_points", "decode_points"):
        points = [msgspec.json.encode(point).decode() for point in getattr(model, name)]
        plain = msgspec.json.format(msgspec.json.encode({name: getattr(model, name)})).decode().strip("{}\n")
        text = text.replace(plain, f'  "{name}": [\n    ' + ",\n    ".join(points) + "\n  ]")
    return text + "\n"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return a fresh measurement and its ratios to the one that is checked in."""
    fresh, known = measure(ENGINE_ARGS, QUICK_ROUNDS if quick else ROUNDS), read_engine_model(TORCH_MODEL)
    took = _relative(fresh.prefill_points, known.prefill_points), _relative(fresh.decode_points, known.decode_points)
    return summary(fresh) | {"prefill_to_checked_in": took[0], "decode_to_checked_in": took[1]}


def _relative(fresh: Sequence[tuple[object, float]], known: Sequence[tuple[object, float]]) -> float:
    return sum(seconds for _, seconds in fresh) / sum(seconds for _, seconds in known)


def main(
    file: Annotated[Path, typer.Argument(help="Where to write the engine model.")],
    engine_arg: Annotated[
        list[str] | None, typer.Option("--engine-arg", help="k=v, of the torch engine (device=cpu, threads=1).")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each step is taken.")] = ROUNDS,
) -> None:
    """Measure the torch engine on this machine."""
    pairs = (arg.partition("=")[::2] for arg in engine_arg or ())
    model = measure(ENGINE_ARGS | dict(pairs), rounds)
    file.write_text(text_of(model))
    Console().print(summary(model))


if __name__ == "__main__":
    typer.run(main)
