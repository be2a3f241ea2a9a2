"""How the phases that others report fit into the time that the one who asks has measured. Pure.

No two clocks are compared: everybody reports durations of his own, and what is left of the asker's interval around
them belongs to him or to the way between.
"""

from msgspec import structs

from schemas.frames import Timings

NO_TIMINGS = Timings()
_IN_ORDER = ("route_s", "prefill_queue_s", "prefill_s", "decode_queue_s", "transfer_s", "first_token_s")


def waited_for(timings: Timings) -> float:
    """Return how many seconds up to the first token are accounted for."""
    return (
        timings.route_s
        + timings.prefill_queue_s
        + timings.prefill_s
        + timings.decode_queue_s
        + timings.transfer_s
        + timings.first_token_s
    )


def fitted(timings: Timings, within_s: float) -> Timings:
    """Return timings that take no longer than `within_s` in all: what is too much is taken from the earliest phases,
    which had begun before the interval did."""
    excess_s = waited_for(timings) - within_s
    if excess_s <= 0:
        return timings
    shorter: dict[str, float] = {}
    for name in _IN_ORDER:
        seconds: float = getattr(timings, name)
        cut_s = min(seconds, max(0.0, excess_s))
        shorter[name] = seconds - cut_s
        excess_s -= cut_s
    return structs.replace(timings, **shorter)
