"""Traces: when requests came, how long they were, and which prefixes they share.

Three published formats, told apart by their first line:
- Mooncake (FAST 25; one JSON object a line: timestamp in ms, input_length, output_length, hash_ids, one for each 512
  tokens, the last for what remains);
- Azure LLM inference 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing of the contents, so nothing is
  shared);
- Vidur (CSV: num_prefill_tokens, num_decode_tokens; no contents and no times, so that arrivals are drawn).
"""

import csv
import random
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
import numpy.typing as npt

HASH_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

MAX_TOKEN_ID = 2**31 - 1

TokenIds = npt.NDArray[np.uint32]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`arrival_s` counts from the first request. `pieces` name the prompt's contents, 512 tokens each."""

    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    pieces: tuple[int, ...]

    def token_ids(self) -> TokenIds:
        """Return ids that two prompts share exactly where they share pieces: uint32 [num_prompt_tokens]."""
        starts = np.array(self.pieces, dtype=np.uint32) * np.uint32(HASH_TOKENS)
        ids: TokenIds = np.add(starts[:, None], np.arange(HASH_TOKENS, dtype=np.uint32), dtype=np.uint32)
        return ids.reshape(-1)[: self.num_prompt_tokens]


class TraceError(Exception):
    """A file that is no trace, or a line of it that isn't."""


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(
    path: Path, *, speed: float = 1.0, max_requests: int = 0, rate: float | None = None, seed: int = 0
) -> list[TraceRequest]:
    """Return the requests in order of arrival, the gaps between them divided by `speed`; raises TraceError.

    `rate`: requests a second of a trace that says nothing of times (1.0), whose gaps are then drawn by `seed` from an
    exponential distribution; any other trace refuses it.
    """
    try:
        with path.open(newline="") as lines:
            found, has_times = _read(lines)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not found:
        raise TraceError(f"{path}: no requests")
    if not has_times:
        found = _timed(found, 1.0 if rate is None else rate, random.Random(seed))
    elif rate is not None:
        raise TraceError(f"{path}: has times of its own; rate is for traces without, speed for all")
    found.sort(key=lambda one: one.arrival_s)
    start = found[0].arrival_s
    kept = found[:max_requests] if max_requests else found
    return [msgspec.structs.replace(one, arrival_s=(one.arrival_s - start) / speed) for one in kept]


def _read(lines: TextIO) -> tuple[list[TraceRequest], bool]:
    """Return the requests as they stand, and whether they have times."""
    first = lines.readline()
    lines.seek(0)
    if not first.strip():
        return [], True
    if first.lstrip().startswith("{"):
        return list(_mooncake(lines)), True
    columns = set(first.strip().split(","))
    for names, read, has_times in _CSV_FORMATS:
        if columns.issuperset(names):
            return list(_rows(lines, read)), has_times
    known = ", or ".join(f"CSV with the columns {', '.join(names)}" for names, _, _ in _CSV_FORMATS)
    raise ValueError(f"of no known format: neither JSON lines (Mooncake) nor {known}")


def _mooncake(lines: TextIO) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        if len(one.hash_ids) * HASH_TOKENS < one.input_length:
            raise ValueError(f"line {number}: {len(one.hash_ids)} hash ids for {one.input_length} tokens")
        if max(one.hash_ids, default=0) >= MAX_TOKEN_ID // HASH_TOKENS:
            raise ValueError(f"line {number}: hash id {max(one.hash_ids)} is too large")
        yield TraceRequest(
            arrival_s=one.timestamp / 1000,
            num_prompt_tokens=max(1, one.input_length),
            max_tokens=max(1, one.output_length),
            pieces=one.hash_ids,
        )


Lengths = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, tokens to generate."""


def _rows(lines: TextIO, read: Callable[[dict[str, str]], Lengths]) -> Iterator[TraceRequest]:
    """Read CSV: prompts that share nothing."""
    num_pieces = 0
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            arrival_s, num_tokens, max_tokens = read(row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from error
        own = range(num_pieces, num_pieces + -(-max(1, num_tokens) // HASH_TOKENS))
        num_pieces = own.stop
        yield TraceRequest(
            arrival_s=arrival_s,
            num_prompt_tokens=max(1, num_tokens),
            max_tokens=max(1, max_tokens),
            pieces=tuple(own),
        )


def _azure(row: dict[str, str]) -> Lengths:
    arrival_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _vidur(row: dict[str, str]) -> Lengths:
    return 0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])


_CSV_FORMATS = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, True),
    (("num_prefill_tokens", "num_decode_tokens"), _vidur, False),
)


def _timed(requests: list[TraceRequest], rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return the requests with drawn arrivals (a Poisson process)."""
    now, timed = 0.0, []
    for one in requests:
        timed.append(msgspec.structs.replace(one, arrival_s=now))
        now += rng.expovariate(rate)
    return timed
