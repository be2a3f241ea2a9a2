"""What happens to a request at its owner, and what its life orders: the two vocabularies of bus.life."""

from typing import Literal, NamedTuple

import msgspec

from schemas.errors import BuswayError
from schemas.frames import Frame
from schemas.ids import AttemptId
from schemas.request import GenerateRequest


class Holder(NamedTuple):
    """Who has an attempt."""

    service: Literal["router", "worker"]
    id: str


class Acked(msgspec.Struct, frozen=True):
    """A router took the attempt."""

    attempt_id: AttemptId
    router: str


class NotTaken(msgspec.Struct, frozen=True):
    """No router took it, as far as is known. `is_busy`: one said that it is full or leaving."""

    attempt_id: AttemptId
    error: BuswayError
    is_busy: bool = False


class FrameCame(msgspec.Struct, frozen=True):
    """`is_backlog`: it was sent before a loss that has been noticed."""

    frame: Frame
    is_backlog: bool = False


class ResendAgreed(msgspec.Struct, frozen=True):
    """Whoever was asked holds the attempt and has sent again what it had; a router may name the worker instead."""

    attempt_id: AttemptId
    by: str


class ResendFailed(msgspec.Struct, frozen=True):
    attempt_id: AttemptId
    error: BuswayError


class HolderLeft(msgspec.Struct, frozen=True):
    """A service is gone for good."""

    id: str


class LossNoticed(msgspec.Struct, frozen=True):
    """Messages were dropped: this request's may be among them."""


class Reconnected(msgspec.Struct, frozen=True):
    """The connection was lost and is back; others may still be on their way."""


class CallerClosed(msgspec.Struct, frozen=True):
    """Nobody wants the completion any more."""


class TimerFired(msgspec.Struct, frozen=True):
    """`wake_at` has come."""


Event = (
    Acked
    | NotTaken
    | FrameCame
    | ResendAgreed
    | ResendFailed
    | HolderLeft
    | LossNoticed
    | Reconnected
    | CallerClosed
    | TimerFired
)


class Send(msgspec.Struct, frozen=True):
    """Publish an attempt. `reason`: the code of the error that cost the attempt before it, "" when there was none."""

    request: GenerateRequest
    reason: str = ""


class AskResend(msgspec.Struct, frozen=True):
    """Ask the holder for the attempt's frames from a token on."""

    attempt_id: AttemptId
    holder: Holder
    from_seq: int


class AbortAt(msgspec.Struct, frozen=True):
    """Tell everyone who may hold the attempt to let go."""

    attempt_id: AttemptId
    holders: tuple[Holder, ...]


class Deliver(msgspec.Struct, frozen=True):
    """Hand a frame to the caller."""

    frame: Frame


class End(msgspec.Struct, frozen=True):
    """The last instruction: well, or with an error."""

    error: BuswayError | None = None


Instruction = Send | AskResend | AbortAt | Deliver | End
