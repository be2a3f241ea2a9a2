"""What requests cost the fleet beyond themselves: how often they were sent anew, and holders asked to send again."""

import re
from typing import NamedTuple


class Cost(NamedTuple):
    num_resubmits: int = 0
    num_resends: int = 0

    def __add__(self, other: object) -> "Cost":
        assert isinstance(other, Cost)
        return Cost(self.num_resubmits + other.num_resubmits, self.num_resends + other.num_resends)

    def since(self, before: "Cost") -> "Cost":
        return Cost(self.num_resubmits - before.num_resubmits, self.num_resends - before.num_resends)


class Tally:
    """That of this process's own client: what Client's on_resubmit and on_resend are told."""

    def __init__(self) -> None:
        self.cost = Cost()

    def resubmitted(self, reason: str) -> None:
        self.cost += Cost(num_resubmits=1)

    def resent(self, holder: str) -> None:
        self.cost += Cost(num_resends=1)


def cost_in(metrics: str) -> Cost:
    """Return that of a gateway's clients, by its /metrics."""

    def total(name: str) -> int:
        return int(sum(map(float, re.findall(rf"^{name}_total(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE))))

    return Cost(total("busway_resumes"), total("busway_resends"))
