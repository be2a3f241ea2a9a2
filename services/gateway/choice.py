"""One completion on its way to the user: frames in, text out. Pure; step 5 of a request's walk.

Joins detokenizer and stop matcher, counts tokens, keeps what the final chunk needs.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from schemas.frames import Decoding, Failed, Finished, FinishReason, Frame, Timings, TokenLogprobs, Tokens, Usage
from services.gateway.detokenizer import Detokenizer
from services.gateway.stop_matcher import StopMatcher

# OpenAI's stand-in for minus infinity, which JSON has not.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its logprobs; `text_offset` is where its text begins in the completion, in characters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one step adds to a choice. `finish_reason` marks the last one, `is_resumed` there a completion that went on
    after a lost worker where that isn't exact."""

    index: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    is_resumed: bool = False


class Choice:
    """`end_ids` are the ids that end this completion (EOS, stop_token_ids): counted and scored, not shown."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stop_strings: Sequence[str] = (),
        end_ids: Set[int] = frozenset(),
        has_logprobs: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.timings = Timings()
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings)
        self._end_ids = end_ids
        self._has_logprobs = has_logprobs
        self._is_by_token = bool(stop_strings) or has_logprobs
        self._num_chars = 0
        self._is_resumed = False

    @property
    def is_stopped_by_string(self) -> bool:
        """Whether the gateway itself ended this completion, so that whoever generates it must be told."""
        return self._matcher.matched is not None

    def feed(self, frames: Sequence[Frame]) -> ChoiceDelta | None:
        """Return what these frames add, or None when that is nothing to tell the user. Failed frames are not for it."""
        text = ""
        scores: list[TokenScore] = []
        num_before = self.num_tokens
        token_ids: list[int] = []
        for frame in frames:
            if isinstance(frame, Tokens):
                if not self._is_by_token:
                    token_ids += frame.token_ids
                elif self.finish_reason is None:
                    text += self._take_by_token(frame, scores)
            elif isinstance(frame, Finished):
                if self.finish_reason is None:
                    text += self._take(token_ids) + self._finish(frame)
                    token_ids = []
            elif isinstance(frame, Decoding):
                # Once more: some of it came from another worker.
                self._is_resumed |= self.num_tokens > 0 and not frame.can_resume_exactly
            elif isinstance(frame, Failed):
                raise TypeError("a failed frame reached the choice: the client library raises it")
        text += self._take(token_ids)
        num_tokens = self.num_tokens - num_before
        if not (num_tokens or text or self.finish_reason):
            return None
        return ChoiceDelta(self.index, text, tuple(scores), self.finish_reason, num_tokens, self._is_resumed)

    def _take(self, token_ids: list[int]) -> str:
        """Take all ids of a step at once: nothing depends on single ones."""
        if not token_ids:
            return ""
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(self._visible(token_ids))

    def _take_by_token(self, frame: Tokens, scores: list[TokenScore]) -> str:
        """As _take, but stops at the very token that completes a stop string."""
        shown = ""
        for i, token_id in enumerate(frame.token_ids):
            self.num_tokens += 1
            if self._has_logprobs:
                logprobs = frame.logprobs[i] if frame.logprobs is not None else TokenLogprobs(logprob=LOWEST_LOGPROB)
                scores.append(_score(token_id, logprobs, self._num_chars))
            text = self._detokenizer.push(self._visible((token_id,)))
            self._num_chars += len(text)
            shown += self._matcher.push(text)
            if self.is_stopped_by_string:
                self.finish_reason = "stop"
                break
        return shown

    def _finish(self, frame: Finished) -> str:
        self.usage = frame.usage
        self._is_resumed |= frame.usage.is_resumed
        self.timings = frame.timings
        self.finish_reason = frame.reason
        shown = self._matcher.push(self._detokenizer.flush())
        if self.is_stopped_by_string:
            self.finish_reason = "stop"
            return shown
        return shown + self._matcher.flush()

    def _visible(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[:-1] if token_ids and token_ids[-1] in self._end_ids else token_ids


def _score(token_id: int, logprobs: TokenLogprobs, text_offset: int) -> TokenScore:
    top = tuple((other_id, _finite(logprob)) for other_id, logprob in logprobs.top)
    return TokenScore(token_id, _finite(logprobs.logprob), top, text_offset)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
