"""Where a request's time went: the gateway's own clock around what the workers report. Pure: `now` is passed in.

The phases up to the first token add up to first_token_s; `other_s` is what nobody claims (the bus, and waiting for an
engine step), negative where phases overlap, as transfer and prefill do in a rendezvous.
"""

from collections.abc import Sequence

from schemas.frames import Accepted, Decoding, Finished, Frame, Prefilling, Timings, Tokens


class Phases:
    """One choice's phases. Times are of one monotonic clock, in seconds; None: not reached."""

    def __init__(self, received_at: float) -> None:
        self.received_at = received_at
        self.sent_at = received_at
        self.accepted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.router = ""
        self.attempt_id = ""
        self.prefill_worker = ""
        self.decode_worker = ""
        self.num_computed_prompt_tokens: int | None = None
        self.num_resubmits: int | None = None
        self._timings = Timings()

    def observe(self, frames: Sequence[Frame], now: float) -> None:
        """Note what these frames tell, which arrived at `now`."""
        for frame in frames:
            match frame:
                case Tokens():
                    self.last_token_at = now
                    if self.first_token_at is None:
                        self.first_token_at = now
                case Accepted():
                    self.accepted_at, self.router = self.accepted_at or now, frame.router
                    self.attempt_id = frame.attempt_id
                case Prefilling():
                    self.prefill_worker = frame.worker
                case Decoding():
                    self.decode_worker = frame.worker
                case Finished():
                    self._timings = frame.timings
                    self.num_computed_prompt_tokens = frame.usage.num_computed_prompt_tokens
                    self.num_resubmits = frame.usage.num_resubmits

    def render(self, now: float) -> dict[str, object]:
        """Return the `busway` object: seconds per phase, KV bytes moved, and who held the request."""
        timings = self._timings
        gateway_s = self.sent_at - self.received_at
        route_s = (self.accepted_at or self.sent_at) - self.sent_at
        first_token_s = (self.first_token_at or now) - self.received_at
        reported_s = timings.prefill_queue_s + timings.prefill_s + timings.transfer_s + timings.decode_queue_s
        seconds = {
            "gateway_s": gateway_s,
            "route_s": route_s,
            "prefill_queue_s": timings.prefill_queue_s,
            "prefill_s": timings.prefill_s,
            "transfer_s": timings.transfer_s,
            "decode_queue_s": timings.decode_queue_s,
            "other_s": first_token_s - gateway_s - route_s - reported_s,
            "first_token_s": first_token_s,
            "decode_s": (self.last_token_at or now) - (self.first_token_at or now),
            "total_s": now - self.received_at,
        }
        return {
            **{name: round(value, 6) for name, value in seconds.items()},
            "kv_bytes": timings.kv_bytes,
            "num_computed_prompt_tokens": self.num_computed_prompt_tokens,
            "num_resubmits": self.num_resubmits,
            "router": self.router,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
        }
