"""Stop strings over text that arrives in pieces. Pure.

The stop string that is complete first ends the text; of several complete at the same character, the one that starts
first. The answer doesn't depend on how the text was split. Text that may yet become a stop string is withheld.
"""

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what may be shown of the text so far and not yet shown; sets `matched` when a stop string is hit.

        After a hit everything further is swallowed.
        """
        if self.matched is not None:
            return ""
        if not self._stop_strings:
            return text
        text = self._withheld + text
        self._withheld = ""
        hit = self._find(text)
        if hit is not None:
            start, self.matched = hit
            return text[:start]
        keep = self._longest_partial(text)
        if keep:
            self._withheld = text[-keep:]
            return text[:-keep]
        return text

    def flush(self) -> str:
        """Return what was withheld: the text has ended without a hit."""
        text, self._withheld = self._withheld, ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _longest_partial(self, text: str) -> int:
        """Return the length of the longest end of the text that is a beginning of some stop string."""
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
