"""Who meets whom: the rendezvous that a prefill worker keeps, one a bootstrap room. Pure: times are passed in.

SGLang lets any two legs meet that name the same room: with different prompts that is the wrong text, with a room used
twice it is one leg's KV for two. So decode asks here first (MeetRequest), and only legs that belong together get to
SGLang at all.
"""

from typing import Literal

import msgspec

from schemas.errors import AbortedError, BuswayError, KvMismatchError, RequestError, WorkerLostError
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.peer import MeetRequest

REMEMBER_S = 600.0

State = Literal["awaited", "met", "delivered", "failed"]


class _Rendezvous(msgspec.Struct, kw_only=True):
    attempt_id: AttemptId
    room: int
    prompt_digest: str
    state: State = "awaited"
    decode: tuple[WorkerId, Epoch] | None = None
    error: BuswayError | None = None
    forget_at: float = 0.0


class RoomBook:
    """The rendezvous of one prefill engine's epoch, those of the last ten minutes among them."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._by_attempt: dict[AttemptId, _Rendezvous] = {}
        self._by_room: dict[int, _Rendezvous] = {}

    def open(self, attempt_id: AttemptId, room: int, prompt_digest: str) -> None:
        """Await decode in this room. Raises RequestError for a room that is or was another attempt's."""
        if room in self._by_room:
            raise RequestError(f"bootstrap room {room} was used before", param="bootstrap")
        made = _Rendezvous(attempt_id=attempt_id, room=room, prompt_digest=prompt_digest)
        self._by_attempt[attempt_id] = self._by_room[room] = made

    def meet(self, request: MeetRequest) -> bool:
        """Note who decodes; return whether that is news (it asks again to see that its peer lives).

        Raises what decode is to end with when the two don't belong together, or the prefill leg is over.
        """
        if request.epoch != self._epoch:
            raise WorkerLostError("that room was another epoch's", phase="transfer")
        kept = self._by_attempt.get(request.attempt_id)
        if kept is None or kept.room != request.room:
            raise WorkerLostError("no prefill of that attempt is in that room", phase="transfer")
        if request.prompt_digest != kept.prompt_digest:
            raise KvMismatchError("the two legs' prompts differ", param="prompt_digest")
        decode = (request.decode_worker, request.decode_epoch)
        if kept.decode is not None and kept.decode != decode:
            raise KvMismatchError("another decode leg is in that room")
        if kept.error is not None:
            raise kept.error
        is_news = kept.state == "awaited"
        if is_news:
            kept.state, kept.decode = "met", decode
        return is_news

    def decode_of(self, attempt_id: AttemptId) -> tuple[WorkerId, Epoch] | None:
        """Return who decodes an attempt, if it has shown up."""
        kept = self._by_attempt.get(attempt_id)
        return None if kept is None else kept.decode

    def delivered(self, attempt_id: AttemptId, now: float) -> None:
        """Decode has the KV."""
        self._end(attempt_id, "delivered", None, now)

    def failed(self, attempt_id: AttemptId, error: BuswayError | None, now: float) -> None:
        """Decode won't get the KV; asked again, that is what it hears."""
        self._end(attempt_id, "failed", error or AbortedError("prefill has given the attempt up"), now)

    def forget(self, now: float) -> None:
        """Drop what nobody can ask for any more."""
        for kept in list(self._by_attempt.values()):
            if kept.forget_at and now >= kept.forget_at:
                del self._by_attempt[kept.attempt_id], self._by_room[kept.room]

    def _end(self, attempt_id: AttemptId, state: State, error: BuswayError | None, now: float) -> None:
        kept = self._by_attempt.get(attempt_id)
        if kept is not None and kept.state in ("awaited", "met"):
            kept.state, kept.error, kept.forget_at = state, error, now + REMEMBER_S
