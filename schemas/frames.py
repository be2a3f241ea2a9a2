"""Stream frames: what a request's owner hears. One NATS message is a JSON array of frames of one publisher and step.

A frame is a JSON array that starts with its tag:
  ["a", attempt, router]                            accepted by a router
  ["p", attempt, worker]                            prefill holds it
  ["d", attempt, worker, can_resume_exactly]        decode holds it; only decode may end it from now on
  ["b", attempt, timings]                           the first token is next; where the time until then went
  ["t", attempt, seq, [ids], [logprobs] | null]     token ids
  ["f", attempt, seq, reason, usage, timings]       terminal: finished
  ["e", attempt, seq, error]                        terminal: failed
`seq` is the number of this completion's tokens before the frame, resumed ones included: a reader sees at once what
it lacks, and a terminal frame shows a lost tail.
"""

from typing import Literal

import msgspec

from schemas.errors import ErrorRecord
from schemas.ids import AttemptId, WorkerId
from schemas.message import decode, encode

FinishReason = Literal["stop", "length"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: the chosen token's, then the k best as (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts. completion_tokens counts resumed ids too; cached_tokens is prefill's prefix hit, of the attempt
    that gave the first token (0 where that was lost before it told);
    num_computed_prompt_tokens is what the decode leg had to compute itself (0: the KV was really used).
    The client library adds: num_resubmits, how often the request was sent anew after its holder was lost;
    is_resumed, that the completion went on where exact continuation isn't promised."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_resubmits: int = 0
    is_resumed: bool = False


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of an attempt's phases, each measured by whoever had it on its own monotonic clock. Those up to the
    first token never overlap: an instant counts for what the first token waited for.

    `route_s`: the router, and messages between it and prefill. `first_token_s`: decode, once it has the KV.
    `decode_s`: from the first token on. `overlap_s` is no phase: transfer that ran while the prompt was computed."""

    route_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_queue_s: float = 0.0
    transfer_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    overlap_s: float = 0.0
    kv_bytes: int = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    attempt_id: AttemptId
    router: str


class Prefilling(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    attempt_id: AttemptId
    worker: WorkerId


class Decoding(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """`can_resume_exactly` as in schemas.worker.RuntimeConfig."""

    attempt_id: AttemptId
    worker: WorkerId
    can_resume_exactly: bool = False


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """Not sent again when it is lost: the Finished frame has these timings too. `cached_tokens` as in Usage (None: not
    told); a completion that is resumed elsewhere still had that hit."""

    attempt_id: AttemptId
    timings: Timings
    cached_tokens: int | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    attempt_id: AttemptId
    seq: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    attempt_id: AttemptId
    seq: int
    reason: FinishReason
    usage: Usage
    timings: Timings = Timings()


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    attempt_id: AttemptId
    seq: int
    error: ErrorRecord


Frame = Accepted | Prefilling | Decoding | Begun | Tokens | Finished | Failed
TERMINAL_FRAMES = (Finished, Failed)


def encode_frames(frames: list[Frame]) -> bytes:
    """Return one message carrying these frames."""
    return encode(frames)


def decode_frames(payload: bytes) -> list[Frame]:
    """Return the frames of one message; raises RequestError when it isn't one."""
    return decode(payload, list[Frame])
