"""A stand-in of TensorRT-LLM's LLM API: **not TensorRT-LLM**, which needs an NVIDIA GPU and was never run here.

What it is: the classes that services/engines/trtllm uses (LLM, SamplingParams, DisaggregatedParams, RequestOutput,
Logprob, RequestError), over an executor thread of its own (stand_in_executor.py) with counted KV blocks. Its model is
the sim engine's arithmetic: a token depends on every row of the request's KV, and a generation phase continues from
the rows that its transfer brought, not from the prompt it was given, so wrong KV reads as other words.

Whose behaviour it follows (the keys are services/engines/trtllm/__init__.py's):
  - one RequestOutput object changed in place, token_ids cumulative, a stop word cut off at the end unless
    include_stop_str_in_output, logprobs one {id: Logprob} a token; non-streaming yields once: result.py R, R0
  - context_only sets max_tokens=1 on the very SamplingParams it is given; the prompt-length check exempts
    generation_only and raises at once; end_id must be set without a tokenizer; unknown arguments of LLM are refused;
    `{}` for an unknown KV capacity: llm.py L, L0, py_executor.py X
  - a string error becomes RequestError while iterating, any other shuts the executor down and is raised to everyone
    who iterates; no statistics before the first request, and their iterator ends when idle: executor.py E
  - END_ID is tested before length, stop words after it, so a context phase never ends by a stop id: sampler.py XS
  - generation_only sends the context's token again as its first; older releases (`is_older`) don't test it for the
    end, and add no logprobs for it: py_executor.py X, PR #16691
  - context KV waits until fetched or kv_transfer_timeout_ms after `length` or `not_finished`, and isn't set up after
    `stop`: openai_disagg_service.py V
  - a context's answer has the first token's logprobs, a list of one {id: Logprob} (or a number) a token: tests [T, O];
    an older release that keeps EOS to itself has no logprobs of it: R cuts them to the tokens
  - with return_perf_metrics the last output says how many bytes of KV a transfer brought: openai_server.py
    #54820179511, timing_metrics.kv_cache_size
  - KV events are numbered, name blocks by hashes of the engine's own (beyond int64 at times), and tell short blocks
    too: _utils.py #52995752
  - abort() is fire-and-forget and ends the stream as `cancelled`; after the end it does nothing: R. During a transfer
    it wedges (PRs #12313, #13713): here that is recorded in `aborts_in_transfer`, which must stay empty.

What it can't show: that the real library behaves so, in any release; its speed, memory, transports, TP/PP resharding,
speculation, attention DP, CUDA graphs; what a real opaque_state holds; races inside its C++.
"""

import asyncio
import functools
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from services.engines.trtllm.api import TrtllmApi
from tests.engines.trtllm.stand_in_executor import Executor, Fabric, Switches
from tests.engines.trtllm.stand_in_metrics import FINISHED_REASON, MetricNames

VERSION = "1.3.0rc29"


class RequestError(RuntimeError):
    """tensorrt_llm.executor.utils.RequestError."""


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class OlderDisaggregatedParams:
    """Before ids of the orchestrator's own."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[Any] | None = None

    def __post_init__(self) -> None:
        _check_request_type(self.request_type)


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """D1, and what [O] has besides."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: DisaggScheduleStyle | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None
    multimodal_embedding_handles: list[Any] | None = None

    def __post_init__(self) -> None:
        _check_request_type(self.request_type)


def _check_request_type(request_type: str | None) -> None:
    if request_type not in (None, "context_only", "generation_only", "context_and_generation"):
        raise ValueError(f"Unknown request type: {request_type}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """S, as far as token ids go."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    return_perf_metrics: bool = False
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        if self.best_of > 1 and self.is_greedy:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")
        for name in ("top_p", "temperature", "min_p"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def is_greedy(self) -> bool:
        are_unset = self.temperature is None and self.top_p is None and self.top_k is None
        return are_unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


class RequestOutput:
    """R: responses are worked in only while somebody iterates."""

    def __init__(self, llm: "StandInLlm", request_id: int, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self.candidate_metrics: list[dict[Any, Any]] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._llm = llm
        self._sampling = sampling
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def post(self, response: Any) -> None:
        """Called on the executor's thread; after the loop has gone nobody listens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def abort(self) -> None:
        self._llm.executor.cancel(self.request_id)

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        response = await self._queue.get()
        if isinstance(response, str):
            raise RequestError(response)
        if isinstance(response, Exception):
            self._llm.shutdown()
            raise response
        self._work_in(response)
        return self

    def _work_in(self, response: SimpleNamespace) -> None:
        output = self.outputs[0]
        self.finished = response.is_final
        self.cached_tokens = response.cached_tokens
        output.token_ids.extend(response.new_token_ids)
        output.logprobs += [
            row if isinstance(row, float) else {one: Logprob(logprob, rank) for one, logprob, rank in row}
            for row in response.new_logprobs
        ]
        if response.disaggregated_params is not None:
            output.disaggregated_params = response.disaggregated_params
            if self._llm.has_first_logprobs and output.logprobs:
                output.disaggregated_params.first_gen_log_probs = output.logprobs[:1]
        if not self.finished:
            return
        output.finish_reason = response.finish_reason
        counts = {
            MetricNames.PROMPT_TOKENS: self._num_prompt_tokens,
            MetricNames.GENERATION_TOKENS: len(output.token_ids),
        }
        self.candidate_metrics = [{FINISHED_REASON: output.finish_reason, **counts}]
        if self._sampling.return_perf_metrics:
            timing_metrics = SimpleNamespace(kv_cache_size=response.kv_cache_size)
            output.request_perf_metrics = SimpleNamespace(timing_metrics=timing_metrics)
        stop_ids = self._sampling.stop_token_ids or ()
        if response.is_stop_word and output.token_ids[-1] in stop_ids:
            output.stop_reason = output.token_ids[-1]
            if not self._sampling.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]


ARGS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "enable_attention_dp": False,
    "dtype": "auto",
    "max_batch_size": 8,
    "max_num_tokens": 512,
    "max_seq_len": None,
    "enable_chunked_prefill": False,
    "enable_iter_perf_stats": False,
    "kv_cache_config": {},
    "cache_transceiver_config": None,
    "stream_interval": 1,
}


class StandInLlm:
    """tensorrt_llm.LLM over a Fabric that stands for the transceivers' network."""

    def __init__(self, fabric: Fabric, switches: Switches, *, model: str, skip_tokenizer_init: bool, **kwargs: Any):
        if unknown := kwargs.keys() - ARGS.keys():
            raise ValueError(f"LLM got invalid argument: {min(unknown)}")
        values: dict[str, Any] = {**ARGS, **kwargs}
        values["kv_cache_config"] = SimpleNamespace(
            **{"dtype": "auto", "tokens_per_block": 4, "max_blocks": 256, "event_buffer_max_size": 0}
            | values["kv_cache_config"]
        )
        if values["cache_transceiver_config"] is not None:
            values["cache_transceiver_config"] = SimpleNamespace(
                **{"backend": None, "kv_transfer_timeout_ms": None} | values["cache_transceiver_config"]
            )
        self.args = SimpleNamespace(model=model, **values)
        self.pid = os.getpid()
        self.has_first_logprobs = switches.fills_first_logprobs and not switches.is_older
        self.switches = switches
        params = OlderDisaggregatedParams if switches.is_older else DisaggregatedParams
        self.executor = Executor(fabric, self.args, switches, params)
        fabric.llms.append(self)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        disaggregated_params: Any = None,
        trace_headers: dict[str, str] | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if self.executor.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        if sampling_params is None or sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not 0 <= priority <= 1:
            raise ValueError("priority must be a float in [0.0, 1.0]")
        kind = None if disaggregated_params is None else disaggregated_params.request_type
        if kind == "context_only":
            sampling_params.max_tokens = 1
        limit = self.args.max_num_tokens
        if kind != "generation_only" and not self.args.enable_chunked_prefill and len(inputs) > limit:
            raise RequestError(f"The sum of prompt length ({len(inputs)}) should not exceed max_num_tokens ({limit})")
        output = RequestOutput(self, self.executor.next_id(), len(inputs), sampling_params)
        self.executor.submit(
            output.request_id,
            list(inputs),
            sampling_params,
            disaggregated_params,
            post=output.post,
            is_streaming=streaming,
            cache_salt=cache_salt or "",
            priority=priority,
            trace_headers=trace_headers,
        )
        return output

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        """E: nothing before the first request."""
        if self.executor.has_begun:
            async for one in _until_idle(self.executor.statistics, timeout):
                yield one

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        """E: not before the first request."""
        assert self.executor.has_begun, "KV Event IterationResult is not properly instantiated."
        async for one in _until_idle(self.executor.kv_events, timeout):
            yield one

    def get_kv_cache_capacity(self) -> dict[str, int]:
        cache = self.args.kv_cache_config
        if not self.switches.knows_capacity:
            return {}
        return {
            "maxNumBlocks": cache.max_blocks,
            "tokensPerBlock": cache.tokens_per_block,
            "maxNumTokens": cache.max_blocks * cache.tokens_per_block,
        }

    def shutdown(self) -> None:
        self.executor.shut_down()


async def _until_idle(found: deque[dict[str, Any]], timeout: float) -> AsyncIterator[dict[str, Any]]:
    """Yield what comes until nothing has come for `timeout` seconds."""
    loop = asyncio.get_running_loop()
    heard_at = loop.time()
    while loop.time() - heard_at < timeout:
        if found:
            heard_at = loop.time()
            yield found.popleft()
        else:
            await asyncio.sleep(0.01)


def stand_in_api(fabric: Fabric, **switches: Any) -> TrtllmApi:
    """Return the stand-in as services.engines.trtllm.api would have loaded the library."""
    chosen = Switches(**switches)
    return TrtllmApi(
        version=VERSION,
        make_llm=functools.partial(StandInLlm, fabric, chosen),
        sampling_params=SamplingParams,
        disaggregated_params=OlderDisaggregatedParams if chosen.is_older else DisaggregatedParams,
        logprob=Logprob,
        request_error=RequestError,
        schedule_style=None if chosen.is_older else DisaggScheduleStyle,
    )
