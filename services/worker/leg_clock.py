"""What a leg's time went into: the engine's word fitted into the worker's own measure. Pure: `now` is monotonic."""

import msgspec

from schemas.frames import Timings
from services.phase_timings import NO_TIMINGS, fitted, waited_for


class LegClock(msgspec.Struct):
    """One leg's, since it was `taken_at`. `before`: what the attempt had cost by then, as whoever sent it says."""

    taken_at: float
    before: Timings = NO_TIMINGS
    first_token_at: float | None = None

    def decoded(self, own: Timings, now: float) -> Timings:
        """Return the attempt's timings up to here, given the engine's: what it doesn't claim of the time until the
        first token was spent on that token, with the KV at hand."""
        window_s = (now if self.first_token_at is None else self.first_token_at) - self.taken_at
        own, before = fitted(own, window_s), self.before
        return Timings(
            route_s=before.route_s,
            prefill_queue_s=before.prefill_queue_s + own.prefill_queue_s,
            prefill_s=before.prefill_s + own.prefill_s,
            decode_queue_s=own.decode_queue_s,
            transfer_s=own.transfer_s,
            first_token_s=own.first_token_s + max(0.0, window_s - waited_for(own)),
            decode_s=own.decode_s,
            overlap_s=own.overlap_s,
            kv_bytes=own.kv_bytes,
        )

    def prefilled(self, own: Timings, now: float) -> Timings:
        """Return a prefill leg's timings, given the engine's: all that wasn't queue was prefill."""
        held_s = now - self.taken_at
        queue_s = min(own.prefill_queue_s, held_s)
        return Timings(prefill_queue_s=queue_s, prefill_s=held_s - queue_s)
