"""Who may still use the blocks of a handed-over prompt: prefill's table of leases. Pure: `now` is passed in.

A lease is held from its grant until it is confirmed (the bytes arrived while it was held), revoked (one side gave
up) or expired; each of the three is final. What became of a lease is remembered, so that a question asked twice gets
one answer.
"""

from heapq import heappop, heappush
from typing import Literal

import msgspec

from schemas.ids import AttemptId

LeaseState = Literal["unknown", "held", "confirmed", "expired", "revoked"]


class _Lease(msgspec.Struct):
    state: LeaseState
    expires_at: float


class LeaseTable:
    """Leases by attempt; all times are seconds of one monotonic clock, `now` must never go back."""

    def __init__(self, *, max_lease_s: float) -> None:
        """`max_lease_s` caps what a holder may ask for at once."""
        self._max_lease_s = max_lease_s
        self._leases: dict[AttemptId, _Lease] = {}
        self._held: set[AttemptId] = set()
        self._by_memory: list[tuple[float, AttemptId]] = []

    def grant(self, attempt_id: AttemptId, *, lease_s: float, now: float, remember_until: float) -> bool:
        """Grant a lease; False when the attempt has had one (also one that ended: attempts are never reused)."""
        if attempt_id in self._leases:
            return False
        self._note(attempt_id, "held", now + min(lease_s, self._max_lease_s), remember_until)
        self._held.add(attempt_id)
        return True

    def renew(self, attempt_id: AttemptId, *, lease_s: float, now: float) -> LeaseState:
        """Extend a held lease to at least `now` + `lease_s` (capped); return its state."""
        if self.state(attempt_id, now) == "held":
            lease = self._leases[attempt_id]
            lease.expires_at = max(lease.expires_at, now + min(lease_s, self._max_lease_s))
        return self.state(attempt_id, now)

    def confirm(self, attempt_id: AttemptId, now: float) -> bool:
        """Return whether the lease has been held throughout until its first confirmation; ends it."""
        if self.state(attempt_id, now) == "held":
            self._end(attempt_id, "confirmed")
        return self.state(attempt_id, now) == "confirmed"

    def revoke(self, attempt_id: AttemptId, now: float, *, remember_until: float) -> bool:
        """End a lease, or forbid one that hasn't been granted yet; return whether it was held until now."""
        state = self.state(attempt_id, now)
        if state == "unknown":
            self._note(attempt_id, "revoked", now, remember_until)
        elif state == "held":
            self._end(attempt_id, "revoked")
        return state == "held"

    def state(self, attempt_id: AttemptId, now: float) -> LeaseState:
        """Return what became of a lease; expiry is judged here, and final."""
        lease = self._leases.get(attempt_id)
        if lease is None:
            return "unknown"
        if lease.state == "held" and now >= lease.expires_at:
            self._end(attempt_id, "expired")
        return lease.state

    def expires_at(self, attempt_id: AttemptId) -> float | None:
        """Return when a held lease will expire; None when it isn't held."""
        return self._leases[attempt_id].expires_at if attempt_id in self._held else None

    def forget(self, now: float) -> None:
        """Drop ended leases whose time to be remembered is over; held ones are judged first.

        Takes as long as what it drops, not as long as what is remembered: that is ten minutes' worth of attempts.
        """
        for attempt_id in list(self._held):
            self.state(attempt_id, now)
        still_held = []
        while self._by_memory and self._by_memory[0][0] <= now:
            _, attempt_id = entry = heappop(self._by_memory)
            if attempt_id in self._held:
                still_held.append(entry)
            else:
                del self._leases[attempt_id]
        for entry in still_held:
            heappush(self._by_memory, entry)

    @property
    def num_held(self) -> int:
        """Leases not ended (an expired one counts until it is judged)."""
        return len(self._held)

    def _note(self, attempt_id: AttemptId, state: LeaseState, expires_at: float, remember_until: float) -> None:
        self._leases[attempt_id] = _Lease(state=state, expires_at=expires_at)
        heappush(self._by_memory, (remember_until, attempt_id))

    def _end(self, attempt_id: AttemptId, state: LeaseState) -> None:
        self._leases[attempt_id].state = state
        self._held.discard(attempt_id)
