"""Which attempts' KV a prefill engine still holds for decode, and how it was let go. Pure: times are passed in.

vLLM tells nobody whether blocks were fetched or their lease ran out (decoding on an expired lease reports success,
vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py@0.32.0 only logs it). We know it from two things the
engine does say: when a request's blocks are free, and how many leases expired in that step.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from schemas.errors import AbortedError, BuswayError, LeaseExpiredError
from schemas.ids import AttemptId

Fate = Literal["held", "fetched", "expired", "revoked", "used"]

REMEMBER_S = 600.0


class _Grant(msgspec.Struct, kw_only=True):
    attempt_id: AttemptId
    lease_ends: float
    fate: Fate = "held"
    forget_at: float = 0.0


class HeldTable:
    """Attempts by the id their request has in the engine. A lease of `lease_s` only ever gets longer (heartbeats)."""

    def __init__(self) -> None:
        self._grants: dict[str, _Grant] = {}
        self._by_attempt: dict[AttemptId, str] = {}

    def grant(self, attempt_id: AttemptId, core_id: str, *, lease_s: float, granted_at: float) -> None:
        """Note that the engine keeps a finished request's blocks; `granted_at` is not after the engine's own start."""
        self._grants[core_id] = _Grant(attempt_id=attempt_id, lease_ends=granted_at + lease_s)
        self._by_attempt[attempt_id] = core_id

    def freed(self, core_ids: Collection[str], *, num_expired: int, now: float) -> None:
        """Take what became free in one step, in which `num_expired` leases ran out.

        Where both can be, the worse is assumed: a lease that was extended and fetched in the very step in which
        another one expired counts as expired.
        """
        for core_id in core_ids:
            grant = self._grants.get(core_id)
            if grant is not None and grant.fate == "held":
                is_expired = num_expired > 0 and now >= grant.lease_ends
                self._end(grant, "expired" if is_expired else "fetched", now)

    def revoke(self, attempt_id: AttemptId, now: float) -> str | None:
        """Give an attempt's KV up; return its id in the engine when that still holds it."""
        core_id = self._by_attempt.get(attempt_id)
        grant = self._grants.get(core_id) if core_id is not None else None
        if grant is None or grant.fate != "held":
            return None
        self._end(grant, "revoked", now)
        return core_id

    def check(self, attempt_id: AttemptId) -> BuswayError | None:
        """Return why the attempt's KV can't be fetched any more; None while it is held and unused."""
        fate = self._fate(attempt_id)
        return None if fate == "held" else _over(fate)

    def confirm(self, attempt_id: AttemptId, now: float) -> BuswayError | None:
        """Return why bytes fetched before now can't be used; None when the blocks were held throughout.

        The first confirmation uses the handoff up: a second decode leg is refused by `check`.
        """
        core_id = self._by_attempt.get(attempt_id)
        grant = self._grants.get(core_id) if core_id is not None else None
        if grant is None or grant.fate not in ("held", "fetched", "used"):
            return _over(grant.fate if grant is not None else None)
        if grant.fate != "used":
            self._end(grant, "used", now)
        return None

    def forget(self, now: float) -> None:
        """Drop what nobody can ask for any more."""
        for core_id, grant in list(self._grants.items()):
            if grant.fate != "held" and now >= grant.forget_at:
                del self._grants[core_id]
                self._by_attempt.pop(grant.attempt_id, None)

    def _fate(self, attempt_id: AttemptId) -> Fate | None:
        core_id = self._by_attempt.get(attempt_id)
        return None if core_id is None else self._grants[core_id].fate

    def _end(self, grant: _Grant, fate: Fate, now: float) -> None:
        grant.fate, grant.forget_at = fate, now + REMEMBER_S


def _over(fate: Fate | None) -> BuswayError:
    if fate == "revoked":
        return AbortedError("prefill has given the attempt up")
    state = {"expired": "its lease ran out", "fetched": "it was fetched", "used": "it was used already"}.get(
        fate or "", "it isn't known here"
    )
    return LeaseExpiredError(f"the KV is no longer the request's: {state}")
