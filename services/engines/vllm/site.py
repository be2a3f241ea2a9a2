"""What all legs of one vLLM engine share."""

from typing import Literal, Protocol

import msgspec

from schemas.ids import AttemptId
from services.engines.adapter.load import CountedLeg
from services.engines.adapter.site import Abortable, AdapterSite
from services.engines.vllm.core import CoreThread
from services.engines.vllm.held import HeldTable
from services.engines.vllm.words import CoreOutput, CoreSpec


class Leg(Abortable, CountedLeg, Protocol):
    """One attempt on this engine."""

    attempt_id: AttemptId

    def take(self, output: CoreOutput) -> None:
        """Take what a step made of this leg's request."""
        ...


class Site(AdapterSite[Leg], kw_only=True):
    """`by_core_id` are the legs by the id that their request has in the engine."""

    core: CoreThread
    spec: CoreSpec
    policy: Literal["recompute", "fail"]
    held: HeldTable = msgspec.field(default_factory=HeldTable)
    by_core_id: dict[str, Leg] = msgspec.field(default_factory=dict)

    def enter(self, attempt_id: AttemptId, core_id: str, leg: Leg) -> None:
        """Note a leg whose request is about to be submitted."""
        self.legs[attempt_id] = leg
        self.by_core_id[core_id] = leg

    def leave(self, attempt_id: AttemptId, core_id: str) -> None:
        """Forget a leg: outputs of its request that are still under way belong to nobody."""
        self.legs.pop(attempt_id, None)
        self.by_core_id.pop(core_id, None)
