"""Attempt ids already taken: core NATS delivers at most once, a reconnecting client may still send twice. Pure."""

from collections import OrderedDict

from schemas.ids import AttemptId


class AttemptDedupe:
    """A bounded memory of attempt ids. `now` is the caller's clock in seconds, never going back.

    An id is remembered for `expiry_s` and while it is among the newest `max_attempts`.
    """

    def __init__(self, *, max_attempts: int = 100_000, expiry_s: float = 600.0) -> None:
        self._max_attempts = max_attempts
        self._expiry_s = expiry_s
        self._seen: OrderedDict[AttemptId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, attempt_id: AttemptId, now: float) -> bool:
        """Note an attempt; return False when it was noted before and is still remembered."""
        self._forget(now)
        if attempt_id in self._seen:
            return False
        self._seen[attempt_id] = now
        return True

    def _forget(self, now: float) -> None:
        while self._seen:
            oldest, noted = next(iter(self._seen.items()))
            if len(self._seen) < self._max_attempts and now - noted < self._expiry_s:
                return
            del self._seen[oldest]
