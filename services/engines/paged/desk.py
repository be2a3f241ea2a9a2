"""What passes between the paged engine's thread and the event loop: orders in, notices out.

The handoffs (pull, rendezvous) live on the event loop and know only these words; the scheduler knows nothing of
transfers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from schemas.errors import ErrorRecord
from schemas.frames import Begun, Failed, Finished, FinishReason, TokenLogprobs, Tokens
from schemas.ids import AttemptId
from schemas.request import GenerateRequest
from schemas.worker import PrefillCost
from services.engines.protocol import CacheChanged


class BlocksReserved(msgspec.Struct, frozen=True, kw_only=True):
    """An awaited prompt has its blocks, in order; the first `num_cached_blocks` already hold valid KV (local
    prefix hit) and must not be written. The rest wait for the transfer."""

    attempt_id: AttemptId
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    queue_s: float


class ChunkComputed(msgspec.Struct, frozen=True, kw_only=True):
    """Of a held prompt, the KV of positions [0, num_computed_tokens) is complete (cached prefix included).
    `block_ids` are all of the prompt's blocks so far."""

    attempt_id: AttemptId
    block_ids: tuple[int, ...]
    num_computed_tokens: int


class PromptComputed(msgspec.Struct, frozen=True, kw_only=True):
    """A held prompt is done and its first token drawn. The blocks stay held until `release`, unless
    `finish_reason` is set: then the request ended with this token and they are free already."""

    attempt_id: AttemptId
    block_ids: tuple[int, ...]
    num_tokens: int
    first_token_id: int
    first_logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    queue_s: float
    prefill_s: float


Notice = CacheChanged | BlocksReserved | ChunkComputed | PromptComputed | Begun | Tokens | Finished | Failed
Notify = Callable[[Sequence[Notice]], None]


class DeskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """As services.engines.protocol.EngineLoad, as far as the scheduler knows it."""

    running: int
    waiting: int
    num_held: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    kv_blocks_quarantined: int
    queued_prefill_tokens: int
    progress: int
    num_recomputed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    pass_tokens: int = 0
    pass_age_s: float = 0.0
    prefill_cost: PrefillCost | None = None


class Desk(Protocol):
    """The engine thread's counter. Thread-safe; every order returns at once and takes effect between two steps.

    All raise RequestError at once for a request that can never fit (context, pool), naming field and limit.
    """

    def generate(self, request: GenerateRequest) -> None:
        """Compute the prompt here and decode: Begun, Tokens …, Finished."""
        ...

    def hold(self, request: GenerateRequest, *, report_chunks: bool) -> None:
        """Compute the prompt and keep its blocks: ChunkComputed … (if asked), PromptComputed.

        With `report_chunks` the first ChunkComputed tells a cached prefix, PromptComputed stands for the last chunk's,
        and finish_reason stays None: the peer is receiving the blocks already and ends the request itself.
        """
        ...

    def reserve(self, request: GenerateRequest) -> None:
        """Await the prompt's KV: BlocksReserved once there are a slot and blocks; then `begin` or `recompute`."""
        ...

    def begin(
        self,
        attempt_id: AttemptId,
        *,
        first_token_id: int,
        first_logprobs: TokenLogprobs | None,
        num_cached_tokens: int,
    ) -> None:
        """The KV is in the reserved blocks: emit the first token and decode on. `num_cached_tokens` is prefill's,
        for usage."""
        ...

    def recompute(self, attempt_id: AttemptId, *, quarantine: bool = False) -> None:
        """The KV won't come: compute the prompt here (counted in num_recomputed_tokens), then decode.

        With `quarantine` (the transfer isn't over yet) the reserved blocks are set aside until `settle` and the
        prompt queues for others.
        """
        ...

    def release(self, attempt_id: AttemptId) -> None:
        """Free a held prompt's blocks (they stay in the prefix cache); idempotent."""
        ...

    def abort(self, attempt_id: AttemptId, *, error: ErrorRecord | None = None, quarantine: bool = False) -> None:
        """End an attempt in any state, without notices, or with one Failed when `error` is given. With
        `quarantine` its blocks are set aside instead of freed: a transfer may still touch them."""
        ...

    def settle(self, attempt_id: AttemptId) -> None:
        """The transfer of a quarantined attempt is over: free its blocks."""
        ...

    def load(self) -> DeskLoad: ...
