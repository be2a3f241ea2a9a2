"""The one place that imports tensorrt_llm, and what of its LLM API this adapter uses, as Protocols.

Versions differ, and none can be run here, so what may or may not be there is asked of the installed classes
themselves (dataclass fields, signatures) once, at start.
"""

import dataclasses
import inspect
import logging
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from schemas.errors import EngineError, RequestError

logger = logging.getLogger(__name__)

WRITTEN_FOR = "1.3.0rc29"
PENALTIES_SINCE = "1.3.0rc24"  # listed in features/sampling.html from this release on [W]
# PRs #16590 and #17172, merged in the summer of 2026: which release had them first isn't known.
MIN_P_AND_SEEDS_SINCE = WRITTEN_FOR

Version = tuple[int, int, int, int]


class Logprob(Protocol):
    """tensorrt_llm.executor.result.Logprob [R]."""

    logprob: float
    rank: int | None


class CompletionOutput(Protocol):
    """One sequence of a RequestOutput [R]. `token_ids` is cumulative; `logprobs` has one {id: Logprob} a token, or one
    number."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | float] | None
    finish_reason: str | None
    stop_reason: int | str | None
    disaggregated_params: Any
    request_perf_metrics: Any


class RequestOutput(Protocol):
    """A request under way [R]. Iterating yields the same object, changed in place; errors surface while iterating."""

    outputs: Sequence[CompletionOutput]
    finished: bool
    cached_tokens: int

    def __aiter__(self) -> AsyncIterator["RequestOutput"]: ...

    def abort(self) -> None:
        """Ask for the end, without waiting for it: the iteration ends with finish_reason 'cancelled'."""
        ...


class Llm(Protocol):
    """tensorrt_llm.LLM [L]."""

    args: Any

    def generate_async(self, inputs: list[int], **kwargs: Any) -> RequestOutput: ...

    def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]: ...

    def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]: ...

    def shutdown(self) -> None: ...


class TrtllmApi(msgspec.Struct, frozen=True, kw_only=True):
    """The installed library: its classes and what they know. `make_llm` is LLM itself, `schedule_style` the enum of
    that name (None where there is none yet), `metrics_collector` MetricsCollector (None: no own metrics)."""

    version: str
    make_llm: Any
    sampling_params: Any
    disaggregated_params: Any
    logprob: Any
    request_error: type[Exception]
    schedule_style: Any = None
    metrics_collector: Any = None

    def sampling_fields(self) -> frozenset[str]:
        """Return the names SamplingParams takes."""
        return _field_names(self.sampling_params)

    def disaggregated_fields(self) -> frozenset[str]:
        """Return the names DisaggregatedParams takes."""
        return _field_names(self.disaggregated_params)

    def has_penalties(self) -> bool:
        """Return whether the sampler applies frequency, presence and repetition penalties."""
        return self._is_from(PENALTIES_SINCE)

    def has_min_p_and_seeds(self) -> bool:
        """Return whether the sampler applies min_p and a request's own seed: older ones take and ignore them [XS]."""
        return self._is_from(MIN_P_AND_SEEDS_SINCE)

    def _is_from(self, version: str) -> bool:
        return parse_version(self.version) >= parse_version(version)


def load_api(*, allow_untested: bool) -> TrtllmApi:
    """Import TensorRT-LLM. Raises ModuleNotFoundError saying what to install, RequestError for a release that this
    adapter wasn't written for, unless `allow_untested`."""
    try:
        import tensorrt_llm
        from tensorrt_llm.executor.result import Logprob as InstalledLogprob
        from tensorrt_llm.executor.utils import RequestError as InstalledRequestError
        from tensorrt_llm.llmapi import DisaggregatedParams
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "tensorrt_llm":
            raise
        raise ModuleNotFoundError(
            "the engine trtllm needs TensorRT-LLM: pip install 'busway[trtllm]' on a machine with an NVIDIA GPU",
            name="tensorrt_llm",
        ) from error
    check_version(tensorrt_llm.__version__, allow_untested=allow_untested)
    return TrtllmApi(
        version=tensorrt_llm.__version__,
        make_llm=tensorrt_llm.LLM,
        sampling_params=tensorrt_llm.SamplingParams,
        disaggregated_params=DisaggregatedParams,
        logprob=InstalledLogprob,
        request_error=InstalledRequestError,
        schedule_style=_schedule_style(),
        metrics_collector=_metrics_collector(),
    )


def _schedule_style() -> Any:
    try:
        from tensorrt_llm.disaggregated_params import DisaggScheduleStyle
    except ImportError:
        return None
    return DisaggScheduleStyle


def _metrics_collector() -> Any:
    try:
        from tensorrt_llm.metrics.collector import MetricsCollector
    except ImportError:
        return None
    return MetricsCollector


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse a release of another minor version, or an older one, with RequestError, or warn of it if
    `allow_untested`."""
    found, written_for = parse_version(version), parse_version(WRITTEN_FOR)
    if found[:2] == written_for[:2] and found >= written_for:
        return
    message = f"TensorRT-LLM {version}: this adapter was written for {WRITTEN_FOR} and newer of its minor version"
    if not allow_untested:
        raise RequestError(f"{message}. --engine-arg allow_untested=true runs it all the same", param="engine")
    logger.warning("%s", message)


def parse_version(version: str) -> Version:
    """Return (major, minor, patch, release candidate); a final release counts as candidate 10000."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?rc(\d+))?", version)
    if found is None:
        raise EngineError(f"TensorRT-LLM calls its version {version!r}, which can't be read")
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch or 0), 10000 if candidate is None else int(candidate)


def parameters_of(function: Any) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def _field_names(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls) if field.init)
