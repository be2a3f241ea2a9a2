"""What a decode leg says of its completion, numbered as the wire numbers it. Pure."""

from schemas.errors import BuswayError
from schemas.frames import Begun, Failed, Finished, FinishReason, Timings, TokenLogprobs, Tokens, Usage
from schemas.request import GenerateRequest


class CompletionFrames:
    """Makes one completion's frames in order. `num_tokens` are those of the frames so far; resumed ones were delivered
    by an attempt before and count, too."""

    def __init__(self, request: GenerateRequest) -> None:
        self.num_tokens = len(request.resume)
        self._attempt_id = request.attempt_id

    def begun(self, timings: Timings, cached_tokens: int) -> Begun:
        """Return the word of where the time until the first token went, and what the prompt's cache hit was."""
        return Begun(self._attempt_id, timings, cached_tokens)

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> Tokens:
        """Return the frame of the next tokens."""
        seq, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        return Tokens(self._attempt_id, seq, token_ids, logprobs)

    def finished(self, reason: FinishReason, usage: Usage, timings: Timings) -> Finished:
        """Return the completion's last frame."""
        return Finished(self._attempt_id, self.num_tokens, reason, usage, timings)

    def failed(self, error: BuswayError) -> Failed:
        """Return the last frame of a completion that failed after these tokens."""
        return Failed(self._attempt_id, self.num_tokens, error.record())


def usage_of(request: GenerateRequest, num_tokens: int, num_cached: int, *, is_remote: bool) -> Usage:
    """Return the counts of a completion of `num_tokens`, resumed ones included, whose prompt was computed elsewhere
    (`is_remote`) or here; `num_cached` is the prefix hit of whoever computed it."""
    num_prompt = len(request.token_ids)
    num_cached = min(num_cached, num_prompt)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_tokens,
        cached_tokens=num_cached,
        num_computed_prompt_tokens=0 if is_remote else num_prompt - num_cached,
    )
