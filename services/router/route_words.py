"""What can happen to a request on its way, and what its route then wants done: the words between journey.py, which
lives through the one and carries out the other, and route.py, which judges.
"""

import msgspec

from schemas.errors import ErrorRecord
from schemas.frames import Frame, Timings
from schemas.handoff import DisaggregatedParams
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import Epoch, WorkerId
from services.router.policies import Leg


class LegSent(msgspec.Struct, frozen=True):
    """A leg is on its way: to `worker`, or to a queue group (None)."""

    leg: Leg
    worker: WorkerId | None


class LegAccepted(msgspec.Struct, frozen=True):
    """`params`: the rendezvous that this prefill will keep."""

    leg: Leg
    worker: WorkerId
    epoch: Epoch
    params: DisaggregatedParams | None = None


class LegBusy(msgspec.Struct, frozen=True):
    """It never held the leg, another may take it."""

    leg: Leg


class StaysOnDecode(msgspec.Struct, frozen=True):
    """The prompt is computed where it is decoded: the leg asked for goes to a decode worker, without params."""


class LegElsewhere(msgspec.Struct, frozen=True):
    """The worker has the attempt by another router's dispatch: the request came to two routers."""

    leg: Leg


class LegRefused(msgspec.Struct, frozen=True):
    """Nobody holds the leg, and nobody will."""

    leg: Leg
    error: ErrorRecord


class LegSilent(msgspec.Struct, frozen=True):
    """No ack within the hop's second: somebody may hold the leg."""

    leg: Leg


class ResultLost(msgspec.Struct, frozen=True):
    """The prefill worker, asked for its result, is silent or knows nothing of the leg."""


class AbortAsked(msgspec.Struct, frozen=True):
    reason: str
    error: ErrorRecord | None = None


class RequestFailed(msgspec.Struct, frozen=True):
    """A deadline passed, or the router itself failed on the request."""

    error: ErrorRecord


class WorkerLeft(msgspec.Struct, frozen=True):
    """It is gone, or has begun a new epoch. Says nothing of legs that it hasn't acked: their hops tell."""

    worker: WorkerId
    epoch: Epoch


Event = (
    LegSent
    | LegAccepted
    | LegBusy
    | StaysOnDecode
    | LegElsewhere
    | LegRefused
    | LegSilent
    | ResultLost
    | PrefillDone
    | PrefillEnded
    | PrefillFailed
    | AbortAsked
    | RequestFailed
    | WorkerLeft
)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Pick a worker and send it this leg."""

    leg: Leg
    params: DisaggregatedParams | None = None
    prefill_worker: WorkerId | None = None
    prefill_timings: Timings = Timings()


class AbortLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Abort the leg wherever it was sent. With `error` its holder ends the request's stream with it."""

    leg: Leg
    reason: str
    error: ErrorRecord | None = None


class Say(msgspec.Struct, frozen=True):
    """Publish frames to the request's stream."""

    frames: list[Frame]


Instruction = Ask | AbortLeg | Say
