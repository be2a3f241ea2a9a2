"""Why a request went where it went, for an answer whose caller asked (`X-Busway-Explain: 1`): its router is asked.

Every choice of an answer is an attempt of its own, maybe of another router.
"""

from collections.abc import Sequence
from time import monotonic

import msgspec

from bus.connection import Bus
from schemas.errors import BuswayError
from schemas.explanation import ExplainRequest, Explanation
from services.gateway.phases import Phases

ANSWER_S = 0.5
MAX_EXPLAINED = 8


class Explainer:
    """Asks routers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def explain(self, choices: Sequence[Phases]) -> list[object]:
        """Return what the routers say of the first MAX_EXPLAINED choices, in order: Explanation as JSON, or
        {"error": …} where a router doesn't answer within ANSWER_S of them all; an answer never fails for want of its
        explanation."""
        until = monotonic() + ANSWER_S
        return [await self._one(phases, until - monotonic()) for phases in choices[:MAX_EXPLAINED]]

    async def _one(self, phases: Phases, timeout_s: float) -> object:
        if timeout_s <= 0:
            return {"error": "no time was left to ask its router"}
        request = ExplainRequest(id=phases.attempt_id)
        try:
            subject = self._bus.subjects.router(phases.router, "explain")
            explanation = await self._bus.ask(subject, request, Explanation, timeout_s=timeout_s)
        except BuswayError as error:
            return {"error": error.message}
        return msgspec.to_builtins(explanation)
