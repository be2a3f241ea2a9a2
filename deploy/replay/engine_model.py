"""How long our own engine's steps take, as measured on a machine (deploy/bench/engine_model.py) and kept in a file.

A prefill chunk of n tokens behind `start` others attends to n * start + n^2 / 2 pairs of tokens; a decode attends to
its whole context. A step's time is taken for linear in tokens, pairs, sequences and context; a step that does both
reads the weights once, so that only the larger of the two bases counts.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from services.engines.paged.planner import StepPlan

Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1)]
Features = tuple[float, float, float]
PrefillPoint = tuple[list[tuple[int, int]], float]
DecodePoint = tuple[list[int], float]

TORCH_MODEL = Path(__file__).with_name("torch.json")
"""SmolLM2-135M-Instruct on the torch engine; the file says on which machine."""


class PrefillTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_s: Seconds
    token_s: Seconds
    pair_s: Seconds


class DecodeTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_s: Seconds
    sequence_s: Seconds
    context_token_s: Seconds


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step."""

    prefill: PrefillTimes
    decode: DecodeTimes

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that a planned step takes."""
        decodes, chunks = plan.slices[: plan.num_decodes], plan.slices[plan.num_decodes :]
        seconds, base_s = 0.0, 0.0
        if decodes:
            _, num_sequences, num_tokens = decode_features([piece.start + 1 for piece in decodes])
            base_s = self.decode.base_s
            seconds += self.decode.sequence_s * num_sequences + self.decode.context_token_s * num_tokens
        if chunks:
            _, num_tokens, num_pairs = prefill_features([(len(piece.token_ids), piece.start) for piece in chunks])
            base_s = max(base_s, self.prefill.base_s)
            seconds += self.prefill.token_s * num_tokens + self.prefill.pair_s * num_pairs
        return base_s + seconds


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's own, which a replay takes unless told otherwise."""

    num_blocks: Count
    block_size: Count
    max_num_seqs: Count
    max_batched_tokens: Count


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured engine. `model` to `threads` say what was measured, where and when. `prefill_points` and
    `decode_points` are what the times are fitted to: chunks as (tokens, start), or context lengths, of one step, and
    its seconds; the misfits are the medians of the fit's relative errors over them."""

    model: str
    engine: str
    machine: str
    date: str
    dtype: str
    threads: Count
    size: MeasuredSize
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0
    gb_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    times: StepTimes
    prefill_misfit: float = 0.0
    decode_misfit: float = 0.0
    prefill_points: list[PrefillPoint] = []
    decode_points: list[DecodePoint] = []


class EngineModelError(Exception):
    """A file that is no engine model."""


def read_engine_model(path: Path) -> EngineModel:
    """Return the model in a file; raises EngineModelError with the field that is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineModel)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineModelError(f"{path}: {error}") from error


def prefill_features(chunks: Iterable[tuple[int, int]]) -> Features:
    """Return (1, tokens, pairs) of chunks given as (tokens, start)."""
    num_tokens, num_pairs = 0, 0.0
    for length, start in chunks:
        num_tokens += length
        num_pairs += length * (start + length / 2)
    return 1.0, float(num_tokens), num_pairs


def decode_features(contexts: Sequence[int]) -> Features:
    """Return (1, sequences, tokens) of decodes given by their context lengths."""
    return 1.0, float(len(contexts)), float(sum(contexts))


def fit(features: Sequence[Features], seconds: Sequence[float]) -> tuple[Features, float]:
    """Return the factors, none negative, whose relative errors are least (in squares), and the median of these."""
    rows: npt.NDArray[np.float64] = np.array(features) / np.array(seconds)[:, None]
    found = [factors for terms in _subsets(rows.shape[1]) if (factors := _solve(rows, terms)) is not None]
    best = min(found, key=lambda factors: float(np.square(rows @ factors - 1.0).sum()))
    one, two, three = best.tolist()
    return (one, two, three), float(np.median(np.abs(rows @ best - 1.0)))


def _subsets(num_terms: int) -> list[tuple[int, ...]]:
    return [terms for size in range(1, num_terms + 1) for terms in combinations(range(num_terms), size)]


def _solve(rows: npt.NDArray[np.float64], terms: tuple[int, ...]) -> npt.NDArray[np.float64] | None:
    """Return the least squares over some of the terms, None when one would be negative."""
    scale = np.abs(rows[:, terms]).max(axis=0)
    solved, *_ = np.linalg.lstsq(rows[:, terms] / scale, np.ones(len(rows)), rcond=None)
    if (solved < 0).any():
        return None
    factors = np.zeros(rows.shape[1])
    factors[list(terms)] = solved / scale
    return factors
