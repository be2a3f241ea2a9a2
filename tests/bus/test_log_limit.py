"""Floods of one message become a line now and then."""

from bus.log_limit import LogLimiter


def test_the_same_text_is_said_once_in_a_while() -> None:
    limiter = LogLimiter(every_s=5.0)
    assert [limiter.allows("dead peer", now / 100) for now in range(6000)].count(True) == 12
    assert limiter.allows("another", 0.0)


def test_many_different_texts_take_bounded_memory() -> None:
    limiter = LogLimiter(max_texts=4)
    assert all(limiter.allows(str(number), 0.0) for number in range(100))
    assert len(limiter._said_at) <= 4
