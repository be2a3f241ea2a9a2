"""Frames of attempts that nobody waits for: who sends them is told to let go. Pure: `now` is seconds of any clock."""

from collections import OrderedDict
from collections.abc import Iterator

from bus.life_events import Holder
from schemas.frames import Accepted, Decoding, Frame, Prefilling, Tokens
from schemas.ids import AttemptId

MAX_REMEMBERED = 4096
REPEAT_S = 1.0


class Strays:
    """Remembers the newest attempts that were given up, and when each of their holders was last told.

    One that says that it holds such an attempt is told once; where tokens keep coming all are told again, at most
    once a second: an abort may get lost as well.
    """

    def __init__(self) -> None:
        self._told: OrderedDict[AttemptId, dict[Holder, float]] = OrderedDict()

    def tell(self, attempt_id: AttemptId, holders: tuple[Holder, ...], now: float) -> list[Holder]:
        """Note that an attempt is given up; return which of its holders don't know yet."""
        told = self._told.setdefault(attempt_id, {})
        self._told.move_to_end(attempt_id)
        if len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)
        new = [holder for holder in holders if holder not in told]
        told.update(dict.fromkeys(new, now))
        return new

    def hear(self, frame: Frame, now: float) -> list[Holder]:
        """Return who must be told because of a frame."""
        match frame:
            case Accepted():
                return self.tell(frame.attempt_id, (Holder("router", frame.router),), now)
            case Prefilling() | Decoding():
                return self.tell(frame.attempt_id, (Holder("worker", frame.worker),), now)
            case Tokens():
                return list(self._again(frame.attempt_id, now))
            case _:
                return []

    def _again(self, attempt_id: AttemptId, now: float) -> Iterator[Holder]:
        told = self._told.get(attempt_id, {})
        for holder, at in told.items():
            if now - at >= REPEAT_S:
                told[holder] = now
                yield holder
