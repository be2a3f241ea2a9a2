"""The prefill pass under way and how long such passes take: what a router needs to guess when the next one begins.

Written by the engine's thread, read by any: both attributes are replaced as a whole.
"""

from msgspec import structs

from schemas.worker import PrefillCost
from services.engines.paged.desk import DeskLoad
from services.engines.paged.planner import StepPlan
from services.pass_times import PassTimes

MIN_SHARE = 8
"""A step tells about prefill when its prompt tokens are so many times its decodes."""


class PassProgress:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._times = PassTimes()
        self._cost: PrefillCost | None = None
        self._under_way = (0, 0.0)

    def begin(self, plan: StepPlan, now: float) -> float:
        """A step begins; return when."""
        self._under_way = (plan.num_prefill_tokens, now)
        return now

    def end(self, plan: StepPlan, seconds: float) -> None:
        """The step has taken so long."""
        self._under_way = (0, 0.0)
        num_tokens = plan.num_prefill_tokens
        if num_tokens and num_tokens >= MIN_SHARE * plan.num_decodes:
            self._times.note(num_tokens, seconds)
            self._cost = self._times.cost()

    def added_to(self, load: DeskLoad, now: float) -> DeskLoad:
        """Return the load with what is known here."""
        num_tokens, since = self._under_way
        if not num_tokens and self._cost is None:
            return load
        return structs.replace(
            load,
            pass_tokens=num_tokens,
            pass_age_s=max(0.0, now - since) if num_tokens else 0.0,
            prefill_cost=self._cost,
        )
