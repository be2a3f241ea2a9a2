"""The torch engine beside transformers' generate: same model, dtype and threads, their runs interleaved.

Decode: milliseconds a step at batch 1, 8 and 24 over a context of 128. Prefill: tokens a second at 512 tokens.
A ratio above 1 says that the engine is that much faster. `python -m deploy.bench.torch_engine [--quick]`.
"""

import copy
import mmap
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deploy.models import fetch_model
from schemas.ids import new_attempt_id
from schemas.request import Sampling
from services.engines.paged.runner import RunnerSpec, SampleSpec, Slice
from services.engines.torch.runner import TorchRunner

CONTEXT_TOKENS = 128
PREFILL_TOKENS = 512
BATCHES = (1, 8, 24)
GREEDY = Sampling(seed=0, temperature=0.0)


def run(quick: bool = False) -> dict[str, Any]:
    """Return {"dtype", "threads", "decode_batch_N": {...}, "prefill_512": {...}}; each with `ours`, `transformers`
    (ms a step, or tokens/s) and `ratio`.

    Both run on a thread of their own, as the engine does: glibc's main arena gives large temporaries back to the
    kernel each time, which would slow both down.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_measure, quick).result()


def _measure(quick: bool) -> dict[str, Any]:
    folder = fetch_model()
    ours = _Ours(folder)
    theirs = _Theirs(folder, ours.spec.layout.dtype)
    rounds, num_steps = (2, 6) if quick else (5, 12)
    result: dict[str, Any] = {"dtype": ours.spec.layout.dtype, "threads": torch.get_num_threads()}
    for batch in BATCHES:
        pairs = [
            (median(ours.decode(batch, num_steps)), median(theirs.decode(batch, num_steps))) for _ in range(rounds)
        ]
        mine, reference = (median(side) * 1000 for side in zip(*pairs, strict=True))
        result[f"decode_batch_{batch}"] = {"ours": mine, "transformers": reference, "ratio": reference / mine}
    pairs = [(ours.prefill(), theirs.prefill()) for _ in range(rounds)]
    mine, reference = (PREFILL_TOKENS / median(side) for side in zip(*pairs, strict=True))
    result[f"prefill_{PREFILL_TOKENS}"] = {"ours": mine, "transformers": reference, "ratio": mine / reference}
    return result


class _Ours:
    def __init__(self, folder: Path) -> None:
        self._runner = TorchRunner(folder, "bench", {"device": "cpu", "num_blocks": "256"})
        self.spec: RunnerSpec = self._runner.load(lambda num_bytes: memoryview(mmap.mmap(-1, num_bytes)))
        self._block_size = self.spec.layout.block_size
        self._execute([_slice(_prompt(CONTEXT_TOKENS), 0, self._table(0))])

    def decode(self, batch: int, num_steps: int) -> list[float]:
        """Return the seconds of each step; the sequences share the context's blocks and have tails of their own."""
        seconds = []
        for step in range(num_steps):
            slices = [_slice([7 + i], CONTEXT_TOKENS + step, self._table(i)) for i in range(batch)]
            seconds.append(self._execute(slices))
        return seconds

    def prefill(self) -> float:
        """Return the seconds of a prompt computed in one step."""
        first = 128
        return self._execute([_slice(_prompt(PREFILL_TOKENS), 0, list(range(first, first + 128)))])

    def _table(self, sequence: int) -> list[int]:
        num_shared = CONTEXT_TOKENS // self._block_size
        return [*range(num_shared), num_shared + 2 * sequence, num_shared + 2 * sequence + 1]

    def _execute(self, slices: list[Slice]) -> float:
        started = time.perf_counter()
        self._runner.execute(slices)
        return time.perf_counter() - started


class _Theirs:
    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._context = torch.tensor([_prompt(CONTEXT_TOKENS)])
        with torch.no_grad():
            self._cache = self._model(self._context, use_cache=True).past_key_values

    def decode(self, batch: int, num_steps: int) -> list[float]:
        """Return the seconds of each step of generate, which starts with the context's KV."""
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(batch)
        context = torch.cat([self._context.repeat(batch, 1), torch.full((batch, 1), 7)], dim=1)
        ticks: list[float] = []
        self._generate(context, num_steps + 1, past_key_values=cache, stopping_criteria=[_Ticking(ticks)])
        return [later - earlier for earlier, later in pairwise(ticks)]

    def prefill(self) -> float:
        """Return the seconds of generating one token from a prompt."""
        started = time.perf_counter()
        self._generate(torch.tensor([_prompt(PREFILL_TOKENS)]), 1)
        return time.perf_counter() - started

    def _generate(self, ids: torch.Tensor, num_tokens: int, **more: Any) -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # past_key_values: the name that 4.56 to 5.24 all know
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **more,
            )


class _Ticking:
    """A stopping criterion that never stops: it notes when each step of generate ended."""

    def __init__(self, ticks: list[float]) -> None:
        self._ticks = ticks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._ticks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _prompt(num_tokens: int) -> list[int]:
    return [(i * 7919) % 40000 + 100 for i in range(num_tokens)]


def _slice(token_ids: list[int], start: int, block_table: list[int]) -> Slice:
    end = start + len(token_ids)
    spec = SampleSpec(sampling=GREEDY, position=end, history=token_ids, num_prompt_tokens=len(token_ids))
    return Slice(attempt_id=new_attempt_id(), token_ids=token_ids, start=start, block_table=block_table, sample=spec)


def main() -> None:
    """Print the table."""
    result = run(quick="--quick" in sys.argv)
    table = Table("", "busway", "transformers", "ratio", title=f"{result['dtype']}, {result['threads']} threads")
    for name, row in result.items():
        if isinstance(row, dict):
            unit = "tokens/s" if name.startswith("prefill") else "ms a step"
            cells = (f"{row[side]:.1f} {unit}" for side in ("ours", "transformers"))
            table.add_row(name, *cells, f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
