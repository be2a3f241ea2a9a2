"""A process that was stopped and woken up knows it."""

from services.worker.stall import StallWatch


def test_a_gap_of_more_than_two_seconds_is_a_stall_and_is_told_once() -> None:
    now = [100.0]
    missed: list[float] = []
    watch = StallWatch(missed.append, clock=lambda: now[0])
    for step in (0.3, 1.9, 2.5, 0.3):
        now[0] += step
        watch.check()
    assert [round(gap, 3) for gap in missed] == [2.5]
