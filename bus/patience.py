"""How long a request waits for what: silence before the holder is asked, and the pauses between attempts. Pure: Unix
seconds come from the caller, jitter from a function that returns [0, 1)."""

from collections.abc import Callable
from typing import NamedTuple

MAX_DOUBLINGS = 16


class Patience(NamedTuple):
    """`silence_s`: the holder is asked after so long without a frame, each time in vain after twice as long, at most
    `max_silence_s`. `suspect_silence_s`: the same after frames may have been lost, spread up to twice as long.

    `answer_s`: for what a resend brings. `last_words_s`: for frames of a holder that is gone. `settle_s`: so long
    after a reconnect others may not be back yet, and nobody's absence counts.

    `max_tries`: attempts that no router takes before the request has ever been held. `max_resubmits`: attempts beyond
    the first for one that was. While such a request finds no taker it tries again for `recovery_s`, with pauses from
    `pause_s` up to `max_pause_s`.
    """

    silence_s: float = 2.0
    max_silence_s: float = 30.0
    suspect_silence_s: float = 0.4
    answer_s: float = 1.0
    last_words_s: float = 0.05
    settle_s: float = 3.0
    max_asks: int = 2
    max_tries: int = 3
    max_resubmits: int = 3
    recovery_s: float = 10.0
    pause_s: float = 0.05
    max_pause_s: float = 1.0


class Quiet:
    """When silence calls for a question."""

    def __init__(self, patience: Patience, jitter: Callable[[], float], now: float) -> None:
        self._patience = patience
        self._jitter = jitter
        self._heard_at = now
        self._num_in_vain = 0
        self._suspect_at: float | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether frames may have been lost since the last one."""
        return self._suspect_at is not None

    @property
    def ask_at(self) -> float:
        """The moment at which the holder should be asked."""
        patience = self._patience
        at = self._heard_at + min(patience.silence_s * (1 << self._num_in_vain), patience.max_silence_s)
        return at if self._suspect_at is None else min(at, self._suspect_at)

    def heard(self, now: float, *, is_backlog: bool) -> None:
        """A frame came; one of the backlog was sent before the loss and clears no suspicion."""
        self._heard_at = now
        self._num_in_vain = 0
        if not is_backlog:
            self._suspect_at = None

    def suspect(self, now: float) -> None:
        """Frames may have been lost: ask soon, but not all at the same moment."""
        self._suspect_at = now + self._patience.suspect_silence_s * (1 + self._jitter())

    def reassured(self, now: float) -> None:
        """The holder was asked and nothing was missing."""
        self._heard_at = now
        self._suspect_at = None
        self._num_in_vain = min(self._num_in_vain + 1, MAX_DOUBLINGS)


class Recovery:
    """How often a request was sent, and when it is next. Pauses grow, and are never in step with other requests'.

    `num_resubmits` counts attempts that replace one that was held. `send_at` is the next moment to send.
    """

    def __init__(self, patience: Patience, jitter: Callable[[], float]) -> None:
        self.num_resubmits = 0
        self.send_at = 0.0
        self._patience = patience
        self._jitter = jitter
        self._num_refusals = 0
        self._until = 0.0

    @property
    def may_resubmit(self) -> bool:
        return self.num_resubmits < self._patience.max_resubmits

    @property
    def is_first_try(self) -> bool:
        """Whether no router has refused it since its holder was lost."""
        return self._num_refusals == 0

    @property
    def was_held(self) -> bool:
        """Whether the request was in somebody's hands: it isn't refused lightly any more."""
        return self.num_resubmits > 0

    def lost(self, now: float) -> None:
        """Its holder is lost: send it anew, and look for a taker for a while."""
        self.num_resubmits += 1
        self._num_refusals = 0
        self._until = now + self._patience.recovery_s
        self._pause(now)

    def refused(self, now: float, *, is_final: bool, is_outage: bool) -> bool:
        """No router took it; return whether to try again. `is_final`: the answer won't change. An outage of the bus
        ends no request that was held: its deadlines do."""
        self._num_refusals += 1
        if self.was_held:
            may_try = not is_final and (is_outage or now < self._until)
        else:
            may_try = not is_final and self._num_refusals < self._patience.max_tries
        if may_try:
            self._pause(now)
        return may_try

    def reconnected(self, now: float) -> None:
        """The bus is back: the search for a taker begins now."""
        self._until = max(self._until, now + self._patience.recovery_s)

    def _pause(self, now: float) -> None:
        pause_s = min(
            self._patience.pause_s * (1 << min(self._num_refusals, MAX_DOUBLINGS)), self._patience.max_pause_s
        )
        self.send_at = now + pause_s * (0.5 + self._jitter())
