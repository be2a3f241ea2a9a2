"""The words of SGLang: what the adapter's parts tell one another of its engine, without importing SGLang."""

import secrets
from typing import Literal

import msgspec

from schemas.errors import BuswayError
from schemas.frames import TokenLogprobs
from schemas.handoff import BootstrapEndpoint

Finish = Literal["stop", "length"]


def fresh_rid() -> str:
    """Return an id for one request in the engine. All have one length: SGLang aborts by prefix, and attempt ids come
    from whoever may send requests."""
    return secrets.token_hex(16)


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine: its own command-line `words`, and what busway decides for it. `host` is where peers
    reach this worker's rendezvous."""

    model_path: str
    words: tuple[str, ...]
    role: Literal["prefill", "decode", "both"]
    host: str


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine says of itself. SGLang's page is our block; the bytes of one are one rank's."""

    version: str
    page_size: int
    num_tokens: int
    max_running: int
    max_batched_tokens: int
    max_context_tokens: int
    vocab_size: int
    kv_dtype: str
    tp_size: int
    pp_size: int
    device: str
    transfer_backend: str
    endpoint: BootstrapEndpoint | None
    has_priorities: bool
    has_seeds: bool
    has_kv_events: bool
    has_metrics: bool
    kv_bytes_per_block: int

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that one request may fill without being cut short: SGLang does that where prompt (in whole pages) and
        completion, with a page and a token to spare, exceed its pool (sglang/srt/mem_cache/allocator/base.py@0.5.23).
        """
        return (self.num_tokens - 1) // self.page_size - 2

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and completion together that a request may have."""
        return min(self.max_context_tokens, self.num_usable_blocks * self.page_size)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine gets it. `sampling` are SamplingParams' arguments; with `room` it is a leg of the
    rendezvous at `endpoint`."""

    rid: str
    token_ids: list[int]
    sampling: dict[str, object]
    num_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    room: int | None = None
    endpoint: BootstrapEndpoint | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step made of one request. The last one has `finish` or `error`.

    `num_cached_tokens` is the prefix hit, of prefill where that was elsewhere.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    error: BuswayError | None = None
    is_last: bool = False
    num_cached_tokens: int = 0
    prompt: "PromptStats | None" = None


class PromptStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler measured of a prompt: seconds queued, seconds from its first pass to its first token, bytes of
    KV that its transfer moved."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_bytes: int = 0


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's own word of its load; `num_reports` counts them. What its prefill passes computed, and for how
    long, counts from its start."""

    num_used_tokens: int = 0
    num_computed_tokens: int = 0
    computing_us: int = 0
    num_reports: int = 0
