"""When a supervised process that ended is started again. Pure: no clock, no processes."""

import msgspec

EXIT_USAGE = 2
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
HEALTHY_S = 30.0
MAX_DEATHS_UNREADY = 3


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Start it again after `delay_s` seconds."""

    delay_s: float


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """It ended as it was asked to (drained): leave it be."""


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """Starting it again won't help."""

    reason: str


class RestartPolicy:
    """Back-off that doubles with each death and starts anew after half a minute of health.

    A process that has never been ready, in all its lives, gets three tries; one that was gets them without end.
    """

    def __init__(self) -> None:
        self._num_deaths = 0
        self._was_ever_ready = False

    def was_ready(self) -> None:
        """The process said that it serves."""
        self._was_ever_ready = True

    def ended(self, *, code: int, ran_s: float) -> Restart | Left | GiveUp:
        """Return what to do after an end with this exit code (negative: the signal) after `ran_s` seconds."""
        if code == 0:
            return Left()
        if code == EXIT_USAGE and not self._was_ever_ready:
            return GiveUp(reason="its configuration can't be used, as its last line says")
        if self._was_ever_ready and ran_s >= HEALTHY_S:
            self._num_deaths = 0
        self._num_deaths += 1
        if not self._was_ever_ready and self._num_deaths >= MAX_DEATHS_UNREADY:
            return GiveUp(
                reason=f"it ended {self._num_deaths} times before it was ready, last with {describe_exit(code)}"
            )
        return Restart(delay_s=min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_deaths - 1)))


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
