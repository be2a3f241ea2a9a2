"""Which of a request's deadlines runs out first. Pure: callers bring the time."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from schemas.errors import DeadlineError, Phase
from schemas.request import Deadlines

DeadlineName = Literal["queue", "prefill", "transfer", "first_token", "total"]


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is Unix time in seconds."""

    at: float
    phase: Phase

    def error(self) -> DeadlineError:
        """Return what the request's owner is told."""
        return DeadlineError(f"the request's deadline passed in phase {self.phase}", phase=self.phase)


def earliest(deadlines: Deadlines, names: Sequence[DeadlineName], current: Phase) -> Due | None:
    """Return the first of the named deadlines; `current` is the phase that a missed first token is blamed on."""
    phases: dict[DeadlineName, Phase] = {
        "queue": "queue",
        "prefill": "prefill",
        "transfer": "transfer",
        "first_token": current,
        "total": "total",
    }
    dues = [Due(at=at, phase=phases[name]) for name in names if (at := _value(deadlines, name)) is not None]
    return min(dues, key=lambda due: due.at, default=None)


def _value(deadlines: Deadlines, name: DeadlineName) -> float | None:
    match name:
        case "queue":
            return deadlines.queue
        case "prefill":
            return deadlines.prefill
        case "transfer":
            return deadlines.transfer
        case "first_token":
            return deadlines.first_token
        case "total":
            return deadlines.total
