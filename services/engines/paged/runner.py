"""What the paged engine asks of a model: one step over slices of sequences. The torch and sim engines each are one.

Called on the engine's thread only. The KV pool belongs to the runner's memory but its blocks to the BlockManager.
"""

from typing import Protocol

import msgspec

from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId
from schemas.model_card import ModelCard
from schemas.request import Sampling
from services.kv.layout import KvLayout, KvRegion


class RunnerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model and its pool are. `num_blocks` is the pool's; `card.eos_token_ids` end a completion.
    `is_deterministic`: the next token depends on the ids before it and the sampling alone, not on what else is in the
    batch (noise is positional in any case)."""

    backend: str
    engine_version: str
    card: ModelCard
    layout: KvLayout
    num_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    is_deterministic: bool = False


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw the token after a slice. `position` is its index in the sequence (the noise's second argument).

    `history`: all ids before it, prompt first (read, never changed); its first `num_prompt_tokens` are the prompt.
    frequency and presence penalties count the completion only, repetition_penalty prompt and completion.
    `banned`: ids that may not be drawn here (EOS and stop ids before min_tokens).
    """

    sampling: Sampling
    position: int
    history: list[int]
    num_prompt_tokens: int
    banned: tuple[int, ...] = ()
    num_logprobs: int | None = None


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one sequence to compute in a step: their KV goes to positions [start, start+len).

    `block_table[i]` holds positions [i*block_size, (i+1)*block_size); KV before `start` is there already.
    `sample` is None for a chunk that doesn't reach the sequence's end.
    """

    attempt_id: AttemptId
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: SampleSpec | None

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.token_ids)


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprobs: TokenLogprobs | None = None


class Unsampled(msgspec.Struct, frozen=True, kw_only=True):
    """No token could be drawn after this slice: its sequence fails, alone, for this `reason`."""

    reason: str


Draw = Sampled | Unsampled


class ModelRunner(Protocol):
    """A model over a paged KV pool."""

    def load(self, allocate: "AllocateHost") -> RunnerSpec:
        """Load weights, allocate the KV pool (host memory through `allocate`), warm up. Blocking; called once."""
        ...

    def region(self) -> KvRegion:
        """Return the pool's memory, for registration with a transfer."""
        ...

    def execute(self, slices: list[Slice]) -> list[Draw | None]:
        """Run one step; the result has one entry a slice, None where it has no sample. What a runner raises is the end
        of its engine."""
        ...

    def close(self) -> None:
        """Free what is the runner's own; the pool's memory lives until the process ends."""
        ...


class AllocateHost(Protocol):
    def __call__(self, num_bytes: int) -> memoryview:
        """Return zeroed, page-aligned host memory that the chosen KvTransfer can serve from."""
        ...
