"""The one face every engine shows its worker. Knows nothing of the bus: events come out, messages to peers go
through a PeerLink.

An engine speaks in the words of the wire (schemas.frames and schemas.hop): it fills in what it knows, the worker
decides where it goes.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from schemas.errors import ErrorRecord
from schemas.frames import Begun, Failed, Finished, Tokens
from schemas.handoff import BootstrapEndpoint, Handoff
from schemas.hop import DecodeRequest, PrefillDone, PrefillEnded, PrefillFailed, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.kv_events import KvChange
from schemas.message import Message
from schemas.model_card import ModelCard
from schemas.worker import PrefillCost

A = TypeVar("A", bound=Message)


class CacheChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache gained or lost blocks. Told before what the step did for attempts; no attempt's own event."""

    changes: tuple[KvChange, ...]
    attempt_id: AttemptId = AttemptId("")


EngineEvent = CacheChanged | Begun | Tokens | Finished | Failed | PrefillDone | PrefillEnded | PrefillFailed
Emit = Callable[[Sequence[EngineEvent]], None]
OwnMetrics = Callable[[], Awaitable[bytes]]
"""Returns the engine's own Prometheus series as text, under its own names; awaited on the event loop."""


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine knows of itself; sizes as in schemas.worker.RuntimeConfig, from the engine, not flags.

    `kv_layout` is the digest of everything both sides of a transfer must share, `kv_transport` what moves the KV ("":
    the engine's own business). `own_metrics` is None where the engine
    has no series but those of EngineLoad. `computes_prompts`: in the role decode it can serve whole requests, too.
    """

    backend: str
    card: ModelCard
    handoff: Handoff
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    kv_layout: str
    kv_dtype: str
    engine_version: str
    kv_transport: str = ""
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    bootstrap: BootstrapEndpoint | None = None
    can_resume_exactly: bool = False
    has_kv_events: bool = False
    can_change_role: bool = False
    own_metrics: OwnMetrics | None = None
    computes_prompts: bool = True


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of load and of totals since start, as in schemas.worker.LoadReport; `progress` grows each step.

    `num_held` counts attempts whose blocks are leased or awaited by a peer: a worker leaves only when it and
    running and waiting are 0.
    """

    running: int
    waiting: int
    num_held: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    kv_blocks_quarantined: int
    queued_prefill_tokens: int
    progress: int
    kv_transfer_bytes: dict[str, int]
    num_remote_prefills: int
    num_recomputed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    pass_tokens: int = 0
    pass_age_s: float = 0.0
    prefill_cost: PrefillCost | None = None
    transfer_cost: PrefillCost | None = None


class PeerLink(Protocol):
    """How an engine asks another worker's engine something; the worker carries it over the bus."""

    async def ask(self, worker: WorkerId, message: Message, answer: type[A], *, timeout_s: float = 1.0) -> A:
        """Return the peer's answer; its ErrorRecord is raised as the exception it stands for.

        Raises NoRespondersError, AckTimeoutError or PayloadTooLargeError.
        """
        ...


class Engine(Protocol):
    """A model replica. All methods are called on the event loop's thread and return at once (run and answer aside)."""

    async def run(
        self,
        *,
        worker: WorkerId,
        epoch: Epoch,
        peers: PeerLink,
        emit: Emit,
        ready: Callable[[EngineProfile], None],
    ) -> None:
        """Load, warm up, call `ready` once, serve until cancelled; raise when the engine's own loop dies.

        `emit` gets every event of an engine step in one call, on the event loop's thread. After a terminal event
        (Finished, Failed, Prefill*) an attempt has no more.
        """
        ...

    def prefill(self, leg: PrefillRequest) -> None:
        """Take a prefill leg; its outcome is one PrefillDone, PrefillEnded or PrefillFailed.

        With leg.bootstrap (rendezvous) a success emits PrefillDone when the KV has been delivered.
        Raises RequestError or CapacityError at once, naming field and limit.
        """
        ...

    def decode(self, leg: DecodeRequest) -> None:
        """Take a decode leg (no params: aggregated); its events are Tokens, then one Finished or Failed, before the
        first Tokens Begun from engines that know by then where the time went. Timings tell of this leg alone: what
        came before it, in `leg.prefill_timings`, the worker adds.

        Raises RequestError or CapacityError at once, naming field and limit.
        """
        ...

    def abort(self, attempt_id: AttemptId, error: ErrorRecord | None = None) -> None:
        """Free everything of an attempt, in any phase; idempotent. No events follow, save one Failed or
        PrefillFailed when `error` is given. A rendezvous peer is told."""
        ...

    async def answer(self, message: Message) -> Message:
        """Answer a message of schemas.peer; raises BuswayError."""
        ...

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """Prepare transfers with a compatible peer (metadata exchange, connection warm-up) in the background."""
        ...

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """Forget a peer that is gone: its transfers fail, attempts that need it fail or recompute."""
        ...

    def load(self) -> EngineLoad:
        """Return the load now."""
        ...
