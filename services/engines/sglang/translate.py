"""Between our words and SGLang's, for one request. Pure: SGLang's words are dicts."""

from typing import Any

from schemas.errors import BuswayError, EngineError, KvTransferFailedError, RequestError
from schemas.frames import TokenLogprobs
from services.engines.adapter.faults import output_fault
from services.engines.sglang.plugin import TRANSFER_MIB
from services.engines.sglang.words import Output, PromptStats, Submission

BAD_REQUEST = 400
NOT_FINITE = "NaN happened"


def arguments_of(submission: Submission) -> dict[str, Any]:
    """Return the arguments of Engine.async_generate. One replica an engine: the room's DP rank is always 0."""
    wants_logprobs = submission.num_logprobs is not None
    arguments: dict[str, Any] = {
        "rid": submission.rid,
        "input_ids": submission.token_ids,
        "sampling_params": submission.sampling,
        "return_logprob": wants_logprobs,
        "top_logprobs_num": submission.num_logprobs or 0,
        "stream": True,
    }
    if submission.cache_salt:
        arguments["cache_salt"] = submission.cache_salt
    if submission.priority:
        arguments["priority"] = submission.priority
    if submission.endpoint is not None:
        arguments["bootstrap_host"] = submission.endpoint.host
        arguments["bootstrap_port"] = submission.endpoint.port
        arguments["bootstrap_room"] = submission.room
    return arguments


class Translator:
    """Turns what SGLang yields for one request into outputs; exactly one of them is the last."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._has_ended = False

    def output(self, chunk: dict[str, Any]) -> Output:
        """Return our form of a chunk: what is new in it, and whether that was all. One that can't be read is an error;
        SGLang's request goes on until it is aborted."""
        try:
            return self._output(chunk)
        except Exception as error:
            fault = output_fault("SGLang", self._submission.rid, error)
            return Output(rid=self._submission.rid, error=fault, is_last=self._has_ended)

    def _output(self, chunk: dict[str, Any]) -> Output:
        meta = chunk["meta_info"]
        reason = meta["finish_reason"]
        self._has_ended = reason is not None
        if reason is not None and reason["type"] == "abort":  # its ids may be old ones
            return self._last(_error_of(reason, is_leg=self._submission.endpoint is not None))
        if reason is not None and reason.get("matched") == NOT_FINITE:
            return self._last(EngineError("the model's logits are not finite"))
        return Output(
            rid=self._submission.rid,
            token_ids=tuple(chunk["output_ids"]),
            logprobs=_logprobs(meta, self._submission.num_logprobs),
            finish=None if reason is None else reason["type"],
            is_last=self._has_ended,
            num_cached_tokens=meta.get("cached_tokens") or 0,
            prompt=_prompt_stats(meta),
        )

    def refused(self, error: Exception) -> Output | None:
        """Return the end of a request that SGLang wouldn't take, or failed on."""
        if isinstance(error, ValueError):
            return self._last(RequestError(f"SGLang refuses the request: {error}"))
        return self._last(EngineError(f"SGLang failed on the request: {type(error).__name__}: {error}"))

    def ended(self) -> Output | None:
        """Return the end of a request that SGLang ended without a word; None after a proper one."""
        return None if self._has_ended else self._last(EngineError("SGLang ended the request without a word"))

    def _last(self, error: BuswayError) -> Output:
        self._has_ended = True
        return Output(rid=self._submission.rid, error=error, is_last=True)


def _error_of(reason: dict[str, Any], *, is_leg: bool) -> BuswayError:
    """Return the error that an `abort` stands for: SGLang raises none."""
    message = str(reason.get("message") or "aborted")
    if reason.get("status_code") == BAD_REQUEST:
        return RequestError(f"SGLang refuses the request: {message}")
    if is_leg:
        return KvTransferFailedError(f"SGLang: {message}", phase="transfer")
    return EngineError(f"SGLang: {message}")


def _prompt_stats(meta: dict[str, Any]) -> PromptStats | None:
    """Return what the scheduler measured; it tells where metrics are enabled."""
    if "queue_time" not in meta:
        return None
    began, ended = meta.get("forward_entry_time") or 0.0, meta.get("prefill_finished_time") or 0.0
    return PromptStats(
        queue_s=max(0.0, meta["queue_time"] or 0.0),
        prefill_s=max(0.0, ended - began) if began else 0.0,
        num_bytes=round((meta.get(TRANSFER_MIB) or 0.0) * 2**20),
    )


def _logprobs(meta: dict[str, Any], num_logprobs: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Return each new token's: SGLang's are (logprob, id, text)."""
    if num_logprobs is None:
        return None
    chosen = meta.get("output_token_logprobs") or []
    best = meta.get("output_top_logprobs") or [()] * len(chosen)
    return tuple(
        TokenLogprobs(float(one[0]), tuple((int(top[1]), float(top[0])) for top in tops or ()))
        for one, tops in zip(chosen, best, strict=True)
    )
