"""What all legs of one vLLM engine share."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Literal, Protocol

import msgspec

from schemas.errors import BuswayError
from schemas.ids import AttemptId, Epoch, WorkerId
from services.engines.adapter.tick import TickEmitter
from services.engines.paged.limits import Limits
from services.engines.protocol import PeerLink
from services.engines.vllm.core import CoreThread
from services.engines.vllm.held import HeldTable
from services.engines.vllm.words import CoreOutput, CoreSpec


class Leg(Protocol):
    """One attempt on this engine."""

    def take(self, output: CoreOutput) -> None:
        """Take what a step made of this leg's request."""
        ...

    def abort(self, error: BuswayError | None) -> None:
        """Free everything; emit one terminal event when `error` is given, else nothing."""
        ...

    def is_running(self) -> bool:
        """Whether it has tokens already."""
        ...

    def num_queued_tokens(self) -> int:
        """How many prompt tokens are still to be computed here."""
        ...


class Totals(msgspec.Struct, kw_only=True):
    """Counters since start, as in EngineLoad."""

    num_remote_prefills: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_transfer_bytes: int = 0


class Site(msgspec.Struct, kw_only=True):
    """`legs` by attempt, `by_core_id` by the id that the leg's request has in the engine."""

    worker: WorkerId
    epoch: Epoch
    core: CoreThread
    spec: CoreSpec
    limits: Limits
    link: PeerLink
    ticks: TickEmitter
    policy: Literal["recompute", "fail"]
    spawn: "Callable[[Coroutine[object, object, None], str], asyncio.Task[None]]"
    held: HeldTable = msgspec.field(default_factory=HeldTable)
    totals: Totals = msgspec.field(default_factory=Totals)
    legs: dict[AttemptId, Leg] = msgspec.field(default_factory=dict)
    by_core_id: dict[str, Leg] = msgspec.field(default_factory=dict)

    def enter(self, attempt_id: AttemptId, core_id: str, leg: Leg) -> None:
        """Note a leg whose request is about to be submitted."""
        self.legs[attempt_id] = leg
        self.by_core_id[core_id] = leg

    def leave(self, attempt_id: AttemptId, core_id: str) -> None:
        """Forget a leg: outputs of its request that are still under way belong to nobody."""
        self.legs.pop(attempt_id, None)
        self.by_core_id.pop(core_id, None)
