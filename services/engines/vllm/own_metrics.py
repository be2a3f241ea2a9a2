"""vLLM's own Prometheus series (`vllm:...`), fed from the core's outputs as vLLM's front end feeds them.

The core runs without that front end, which would keep what a request's series need: when it arrived, whether it has a
token, how long its prompt was (OutputProcessor in vllm/v1/engine/output_processor.py@0.32.0). Engine's thread only,
but for `text`.
"""

import time
from typing import Any

import msgspec

from services.engines.adapter.series import series_text

PREFIX = "vllm:"


class _Request(msgspec.Struct, kw_only=True):
    """`stats` is vLLM's RequestStateStats."""

    stats: Any
    num_prompt_tokens: int
    max_tokens: int
    is_prefilling: bool = True


class OwnMetrics:
    """The series of one core; `config` is its VllmConfig. A process has one core: vLLM's registry is global."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger
        from vllm.v1.metrics.stats import LoRARequestStates

        self._logger = PrometheusStatLogger(config)
        self._logger.log_engine_initialized()
        self._lora_states = LoRARequestStates(log_stats=False)
        self._requests: dict[str, _Request] = {}

    def submitted(self, core_id: str, *, num_prompt_tokens: int, max_tokens: int) -> None:
        """A request has entered the core."""
        from vllm.v1.metrics.stats import RequestStateStats

        self._requests[core_id] = _Request(
            stats=RequestStateStats(arrival_time=time.time()),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
        )

    def left(self, core_id: str) -> None:
        """A request was ended from outside: nothing more comes of it."""
        self._requests.pop(core_id, None)

    def note(self, made: Any) -> None:
        """Take one step's EngineCoreOutputs."""
        from vllm.v1.metrics.stats import IterationStats

        iteration = IterationStats() if made.outputs else None
        for output in made.outputs:
            request = self._requests.get(output.request_id)
            if request is not None:
                self._note_output(iteration, output, made.timestamp, request)
        self._logger.record(made.scheduler_stats, iteration)

    def _note_output(self, iteration: Any, output: Any, timestamp: float, request: _Request) -> None:
        iteration.update_from_output(output, timestamp, request.is_prefilling, request.stats, self._lora_states, None)
        request.is_prefilling = request.is_prefilling and not output.new_token_ids
        if output.finish_reason is None:
            return
        self._requests.pop(output.request_id)
        iteration.update_from_finished_request(
            finish_reason=output.finish_reason,
            request_id=output.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens_param=request.max_tokens,
            req_stats=request.stats,
        )


def text() -> bytes:
    """Return the series in Prometheus' text form; any thread may ask."""
    return series_text(PREFIX)
