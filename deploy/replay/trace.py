"""Traces: when requests came, how long they were, and which prefixes they share.

Two published formats. Mooncake (FAST 25; one JSON object a line: timestamp in ms, input_length, output_length,
hash_ids, one for each 512 tokens, the last for what remains) and Azure LLM inference 2023 (CSV: TIMESTAMP,
ContextTokens, GeneratedTokens; nothing of the contents, so nothing is shared).
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

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


def read_trace(path: Path, *, speed: float = 1.0, max_requests: int = 0) -> list[TraceRequest]:
    """Return the requests in order of arrival, the gaps between them divided by `speed`; raises TraceError."""
    try:
        found = list(_azure(path) if path.suffix == ".csv" else _mooncake(path))
    except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not found:
        raise TraceError(f"{path}: no requests")
    found.sort(key=lambda one: one.arrival_s)
    start = found[0].arrival_s
    kept = found[:max_requests] if max_requests else found
    return [msgspec.structs.replace(one, arrival_s=(one.arrival_s - start) / speed) for one in kept]


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            one = decoder.decode(line)
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


def _azure(path: Path) -> Iterator[TraceRequest]:
    num_pieces = 0
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            num_tokens = max(1, int(row["ContextTokens"]))
            own = range(num_pieces, num_pieces + -(-num_tokens // HASH_TOKENS))
            num_pieces = own.stop
            yield TraceRequest(
                arrival_s=datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                num_prompt_tokens=num_tokens,
                max_tokens=max(1, int(row["GeneratedTokens"])),
                pieces=tuple(own),
            )
