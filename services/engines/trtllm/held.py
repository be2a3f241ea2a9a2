"""The context KV that waits to be fetched. Pure; the caller's clock is monotonic.

The LLM API frees it in two ways only: a generation phase fetches it, or the transceiver's kv_transfer_timeout_ms
passes [A]. It says neither to us: decode's adapter tells ours with a ConfirmRequest, and the time-out is counted here.
"""

import msgspec

from schemas.ids import AttemptId


class _Held(msgspec.Struct, frozen=True):
    until: float
    num_blocks: int


class HeldKv:
    """Who holds what, for load reports and for leaving."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[AttemptId, _Held] = {}

    def hold(self, attempt_id: AttemptId, num_blocks: int, now: float) -> None:
        """The context phase is over and its KV waits."""
        self._held[attempt_id] = _Held(now + self._timeout_s, num_blocks)

    def fetched(self, attempt_id: AttemptId) -> bool:
        """Decode has it; returns whether it was still held."""
        return self._held.pop(attempt_id, None) is not None

    def totals(self, now: float) -> tuple[int, int]:
        """Return how many attempts are held and how many blocks they pin, those timed out not counted any more."""
        self._held = {attempt_id: one for attempt_id, one in self._held.items() if now < one.until}
        return len(self._held), sum(one.num_blocks for one in self._held.values())
