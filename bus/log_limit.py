"""Saying a thing at most once in a while: a dead peer or a hostile client must not fill the log. Pure."""


class LogLimiter:
    """Bounded memory of what was said when; `now` is the caller's monotonic clock in seconds."""

    def __init__(self, *, every_s: float = 5.0, max_texts: int = 256) -> None:
        self._every_s = every_s
        self._max_texts = max_texts
        self._said_at: dict[str, float] = {}

    def allows(self, text: str, now: float) -> bool:
        """Note that `text` is to be said; return whether it hasn't been for `every_s`."""
        if now - self._said_at.get(text, float("-inf")) < self._every_s:
            return False
        if len(self._said_at) >= self._max_texts:
            self._said_at.clear()
        self._said_at[text] = now
        return True
