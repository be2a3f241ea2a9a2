"""Which deadline of a request is the next, and which has passed. Pure: `now` is Unix time in seconds.

A deadline names the phase that has to be over by then; receivers check before they start a phase, the client library
while it waits.
"""

from typing import Literal, NamedTuple

from schemas.errors import DeadlineError, Phase
from schemas.request import Deadlines

Stage = Literal["sent", "accepted", "prefilling", "decoding", "streaming"]


class Due(NamedTuple):
    """A moment in Unix time and the phase that must be over by then."""

    at: float
    phase: Phase


def next_due(deadlines: Deadlines, stage: Stage, last_token_at: float | None = None) -> Due | None:
    """Return the earliest deadline that counts in a stage, or None.

    `queue` counts until a worker holds the request, `prefill` until decode does, `transfer` and `first_token` until
    the first token (blamed on the phase the request is in), `inter_token_s` from the last token on, `total` always.
    """
    due: list[Due] = []
    if deadlines.total is not None:
        due.append(Due(deadlines.total, "total"))
    if stage == "streaming":
        if deadlines.inter_token_s is not None and last_token_at is not None:
            due.append(Due(last_token_at + deadlines.inter_token_s, "decode"))
    else:
        phase = _PHASES[stage]
        limits = [deadlines.first_token, deadlines.transfer]
        if stage != "decoding":
            limits.append(deadlines.prefill)
        if stage in ("sent", "accepted"):
            limits.append(deadlines.queue)
        due += [Due(at, phase) for at in limits if at is not None]
    return min(due, default=None)


def check_deadlines(deadlines: Deadlines, stage: Stage, now: float) -> None:
    """Raise DeadlineError naming the phase when a deadline that counts in this stage has passed."""
    due = next_due(deadlines, stage)
    if due is not None and due.at <= now:
        raise late(due)


def late(due: Due) -> DeadlineError:
    """Return the error for a deadline that has passed."""
    return DeadlineError(f"deadline of phase {due.phase} passed", phase=due.phase)


_PHASES: dict[Stage, Phase] = {"sent": "queue", "accepted": "queue", "prefilling": "prefill", "decoding": "transfer"}
