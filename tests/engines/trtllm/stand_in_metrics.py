"""A stand-in for TensorRT-LLM's MetricsCollector: **not TensorRT-LLM**. A few of its series, under its names and from
the keys that it reads (services/engines/trtllm's table: M)."""

from enum import Enum
from typing import Any

from prometheus_client import Counter, Gauge


class MetricNames(Enum):
    """The keys of a request's metrics; the finish reason's is a plain word."""

    PROMPT_TOKENS = "prompt_tokens"
    GENERATION_TOKENS = "generation_tokens"


FINISHED_REASON = "finished_reason"


class MetricsCollector:
    """Registers its series with the process's registry when it is made: a second one in a process is an error."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        names = list(labels)
        self._success = Counter("trtllm_request_success_total", "Requests.", [*names, FINISHED_REASON])
        self._prompt_tokens = Counter("trtllm_prompt_tokens_total", "Input tokens.", names)
        self._generation_tokens = Counter("trtllm_generation_tokens_total", "Output tokens.", names)
        self._used_blocks = Gauge("trtllm_kv_cache_used_blocks", "Used KV cache blocks.", names)

    def log_request_metrics_dict(self, metrics_dict: dict[Any, Any]) -> None:
        """Count a request that has finished."""
        if reason := metrics_dict.get(FINISHED_REASON):
            self._success.labels(**self._labels, **{FINISHED_REASON: reason}).inc()
            self._prompt_tokens.labels(**self._labels).inc(metrics_dict.get(MetricNames.PROMPT_TOKENS, 0))
            self._generation_tokens.labels(**self._labels).inc(metrics_dict.get(MetricNames.GENERATION_TOKENS, 0))

    def log_iteration_stats(self, iteration_stats: dict[str, Any]) -> None:
        """Note the KV cache's state."""
        if kv_stats := iteration_stats.get("kvCacheStats"):
            self._used_blocks.labels(**self._labels).set(kv_stats["usedNumBlocks"])
