"""Who may still use the blocks of a handed-over prompt: prefill's table of leases. Pure: `now` is passed in.

services.kv.lease_table is its map: a lease is held from its grant until it is confirmed, revoked or expired; each of
the three is final. What became of a lease is remembered, so that a question asked twice gets one answer.
"""

from heapq import heappop, heappush

import msgspec

from schemas.ids import AttemptId
from services.kv.lease_table import TABLE, LeaseState, LeaseTurn


class _Lease(msgspec.Struct):
    expires_at: float
    state: LeaseState = "unknown"


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
        self._note(attempt_id, now + min(lease_s, self._max_lease_s), remember_until)
        return self._turn(attempt_id, "grant")

    def renew(self, attempt_id: AttemptId, *, lease_s: float, now: float) -> LeaseState:
        """Extend a held lease to at least `now` + `lease_s` (capped); return its state."""
        self._judge(attempt_id, now)
        if self._turn(attempt_id, "renew"):
            lease = self._leases[attempt_id]
            lease.expires_at = max(lease.expires_at, now + min(lease_s, self._max_lease_s))
        return self._state(attempt_id)

    def confirm(self, attempt_id: AttemptId, now: float) -> bool:
        """Return whether the lease has been held throughout until its first confirmation; ends it."""
        self._judge(attempt_id, now)
        self._turn(attempt_id, "confirm")
        return self._state(attempt_id) == "confirmed"

    def revoke(self, attempt_id: AttemptId, now: float, *, remember_until: float) -> bool:
        """End a lease, or forbid one that hasn't been granted yet; return whether it was held until now."""
        was_held = self.state(attempt_id, now) == "held"
        if attempt_id not in self._leases:
            self._note(attempt_id, now, remember_until)
        self._turn(attempt_id, "revoke")
        return was_held

    def state(self, attempt_id: AttemptId, now: float) -> LeaseState:
        """Return what became of a lease; expiry is judged here, and final."""
        self._judge(attempt_id, now)
        return self._state(attempt_id)

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

    def _note(self, attempt_id: AttemptId, expires_at: float, remember_until: float) -> None:
        self._leases[attempt_id] = _Lease(expires_at=expires_at)
        heappush(self._by_memory, (remember_until, attempt_id))

    def _state(self, attempt_id: AttemptId) -> LeaseState:
        lease = self._leases.get(attempt_id)
        return "unknown" if lease is None else lease.state

    def _judge(self, attempt_id: AttemptId, now: float) -> None:
        lease = self._leases.get(attempt_id)
        if lease is not None and now >= lease.expires_at:
            self._turn(attempt_id, "expire")

    def _turn(self, attempt_id: AttemptId, turn: LeaseTurn) -> bool:
        """Move a lease as the table says; return whether it says anything."""
        lease = self._leases.get(attempt_id)
        after = None if lease is None else TABLE.get((lease.state, turn))
        if lease is None or after is None:
            return False
        lease.state = after
        if after == "held":
            self._held.add(attempt_id)
        else:
            self._held.discard(attempt_id)
        return True
