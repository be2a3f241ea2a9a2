"""What of a RequestOutput is new, and whether it ends the completion. Pure.

An output is one object that grows: `token_ids` and `logprobs` are cumulative, so this keeps a cursor (`token_ids_diff`
once hid the first token of a generation_only request [R0]). Older releases don't test the re-emitted context token
for EOS, stop ids or length and go on beyond it [X, PR #16691]: the end is decided here, by busway's rules.
"""

import msgspec

from schemas.errors import BuswayError, DeadlineError, EngineError
from schemas.frames import FinishReason, TokenLogprobs
from services.engines.trtllm.api import CompletionOutput, Logprob

LogprobRow = dict[int, Logprob]
"""A position's logprobs by id. Samplers of a draft in the same model give the chosen id's alone, as a number [R, O]."""
UNKNOWN_LOGPROB = -9999.0  # OpenAI's word for one that can't be said


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens, at most up to the one that ends the completion; `reason` is set with that one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    reason: FinishReason | None


class Completion:
    """One completion's progress. `max_tokens` doesn't count resumed ids.

    `first_row`: the context phase's logprobs of the first token, for releases whose generation phase has none.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        end_id: int | None,
        num_logprobs: int | None,
        first_row: LogprobRow | float | None = None,
    ) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._end_id = end_id
        self._num_logprobs = num_logprobs
        self._first_row = first_row

    def take(self, output: CompletionOutput, *, is_final: bool) -> Step:
        """Return what is new in the output. Raises what a bad end stands for (time-out, cancelled, no reason)."""
        start = self.num_tokens
        cut_off = self._cut_off(output, is_final)
        found = [*output.token_ids[start:], *cut_off]
        reason: FinishReason | None = None
        new: list[int] = []
        for token_id in found:
            new.append(token_id)
            reason = self._reason(token_id, start + len(new))
            if reason is not None:
                break
        logprobs = self._logprobs(output, new, num_known=len(found) - len(cut_off))
        self.num_tokens += len(new)
        if reason is None and is_final:
            reason = _engine_reason(output.finish_reason)
        return Step(token_ids=tuple(new), logprobs=logprobs, reason=reason)

    def _reason(self, token_id: int, count: int) -> FinishReason | None:
        if token_id in self._stop_ids:
            return "stop"
        return "length" if count >= self._max_tokens else None

    def _cut_off(self, output: CompletionOutput, is_final: bool) -> list[int]:
        """Return the id at which the engine stopped, where it kept that to itself."""
        if not is_final or output.finish_reason != "stop":
            return []
        if output.token_ids and output.token_ids[-1] in self._stop_ids:
            return []
        stopped_at = output.stop_reason if isinstance(output.stop_reason, int) else self._end_id
        return [] if stopped_at is None or stopped_at not in self._stop_ids else [stopped_at]

    def _logprobs(
        self, output: CompletionOutput, new: list[int], *, num_known: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """Return each new token's. What the engine kept to itself may have none: no reason to lose the completion."""
        if self._num_logprobs is None:
            return None
        rows: list[LogprobRow | float] = list(output.logprobs or ())
        if self._first_row is not None and len(rows) < len(output.token_ids):
            rows.insert(0, self._first_row)
        found = []
        for place, token_id in enumerate(new):
            index = self.num_tokens + place
            if index >= len(rows) and place >= num_known:
                found.append(TokenLogprobs(UNKNOWN_LOGPROB))
            else:
                found.append(self._row(rows[index] if index < len(rows) else {}, token_id))
        return tuple(found)

    def _row(self, row: LogprobRow | float, token_id: int) -> TokenLogprobs:
        if isinstance(row, int | float):
            if self._num_logprobs:
                raise EngineError("TensorRT-LLM gave the chosen token's logprob alone, no top ones")
            return TokenLogprobs(logprob=float(row))
        if token_id not in row:
            raise EngineError(f"TensorRT-LLM gave no logprobs for token {token_id}")
        best = sorted(row.items(), key=lambda item: -item[1].logprob)[: self._num_logprobs or 0]
        return TokenLogprobs(logprob=row[token_id].logprob, top=tuple((one, logprob.logprob) for one, logprob in best))


def _engine_reason(finish_reason: str | None) -> FinishReason:
    """Return the reason of an end that the tokens don't show (the context is full)."""
    match finish_reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case _:
            raise bad_end(finish_reason)


def bad_end(finish_reason: str | None) -> BuswayError:
    """Return the error that a request's bad end stands for."""
    if finish_reason == "timeout":
        return DeadlineError("TensorRT-LLM timed the request out", phase="decode")
    return EngineError(f"TensorRT-LLM ended the request with finish reason {finish_reason!r}")
