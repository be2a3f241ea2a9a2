"""Starting vLLM's engine core in this process. Only this and its neighbours that step the core import vLLM.

In process, not AsyncLLM: it starts in a fifth of the time (facts: 34 s for a pair against 181 s on two cores), its
scheduler can be asked which blocks are still held, and each step's outputs come together instead of through one
generator a request. Tensor parallel workers are processes of their own here, too.
"""

import argparse
import contextlib
import io
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from schemas.errors import RequestError
from services.engines.vllm.words import NIXL_CONNECTORS, CoreSpec, LaunchOptions

DEFAULT_CONNECTOR = "NixlConnector"
KV_FLAG = "--kv-transfer-config"
EXTRA_FIELD, LEASE_FIELD = "kv_connector_extra_config", "kv_lease_duration"
EAGER_FLAG = "--enforce-eager"
MODEL_FLAG = "--model"


def start_core(options: LaunchOptions) -> tuple[Any, Any, CoreSpec]:
    """Load the model and return an EngineCore, its VllmConfig and its spec; takes seconds to minutes.

    Raises RequestError for words that vLLM refuses or that are busway's, for an unknown connector and for data
    parallelism.
    """
    refuse_ours(options.words)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # also keeps a CPU worker in this process
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", options.side_channel_host)
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_free_port(options.side_channel_host)))
    os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # cache_events.py asks for blocks by their hash
    if EAGER_FLAG in (word.replace("_", "-") for word in options.words):
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else a helper for logprobs is compiled all the same
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = _vllm_config(options)
    if config.parallel_config.data_parallel_size > 1:
        raise RequestError("run one busway worker for each data-parallel replica", param="data_parallel_size")
    core = EngineCore(config, Executor.get_class(config), log_stats=True)
    return core, config, _spec(core, config)


def _vllm_config(options: LaunchOptions) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", add_help=False))
    words, connector = take_flag(options.words, KV_FLAG)
    arguments = _parsed(parser, [*words, "--model", options.model_path])
    if arguments.kv_transfer_config is not None:  # by a shortened name, which vLLM's parser takes
        raise _in_pieces(KV_FLAG)
    arguments.kv_transfer_config = _kv_transfer(connector, options)
    arguments.enable_logging_iteration_details = True  # says what a step computed; nothing is logged for it here
    arguments.kv_events_config = arguments.kv_events_config or _kv_events()
    try:
        return EngineArgs.from_cli_args(arguments).create_engine_config()
    except (ValueError, TypeError) as error:
        raise RequestError(f"vLLM refuses its arguments: {error}", param="engine_args") from error


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(words)
    except SystemExit:
        raise RequestError(f"vLLM refuses its arguments: {_error_of(said.getvalue())}", param="engine_args") from None


def _kv_transfer(given: str | None, options: LaunchOptions) -> Any:
    from vllm.config import KVTransferConfig

    fields = kv_transfer_fields(given, options)
    if fields is None:
        return None
    _check_connector(fields)
    try:
        return KVTransferConfig(**fields)
    except (ValueError, TypeError) as error:
        raise RequestError(f"vLLM refuses {KV_FLAG}: {error}", param="engine_words") from error


def kv_transfer_fields(given: str | None, options: LaunchOptions) -> dict[str, Any] | None:
    """Return the connector's settings: what the user gave, completed by the role's and the worker's; None for no
    connector. Raises RequestError for what isn't JSON objects."""
    if given is None and options.kv_role is None:
        return None
    fields = _as_fields(given)
    fields.setdefault("kv_connector", DEFAULT_CONNECTOR)
    fields.setdefault("kv_role", options.kv_role or "kv_both")
    fields.setdefault("kv_load_failure_policy", options.kv_load_failure)
    if fields["kv_connector"] in NIXL_CONNECTORS:
        extra = fields.setdefault(EXTRA_FIELD, {})
        if not isinstance(extra, dict):
            raise RequestError(f"{EXTRA_FIELD} in {KV_FLAG} is no JSON object: {extra!r}", param="engine_words")
        extra.setdefault(LEASE_FIELD, max(1, round(options.lease_s)))
    return fields


def _kv_events() -> Any:
    """Return the config by which the core notes its KV events: prefix_cache.py takes them where they would be published
    (a setting of the user's own publishes them as well)."""
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def _error_of(said: str) -> str:
    """Return what argparse says behind its usage, on one line."""
    return " ".join(said.rpartition("error:")[2].split())[:500]


def refuse_ours(words: Sequence[str]) -> None:
    """Raise RequestError for words that busway's own would replace without a word."""
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name == MODEL_FLAG:
            raise RequestError(f"{MODEL_FLAG} is busway's to set, before the --", param="engine_words")
        if name.startswith(KV_FLAG + "."):
            raise _in_pieces(name)


def _in_pieces(name: str) -> RequestError:
    return RequestError(f"give {KV_FLAG} by that name and as one JSON object, not {name}", param="engine_words")


def take_flag(words: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Return the words without a flag and its value (`flag value` or `flag=value`), and the value."""
    rest: list[str] = []
    value: str | None = None
    left = iter(words)
    for word in left:
        name, is_joined, joined = word.partition("=")
        if name.replace("_", "-") == flag:
            value = joined if is_joined else next(left, "")
        else:
            rest.append(word)
    return rest, value


def _as_fields(given: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(given or "{}")
    except ValueError as error:
        raise RequestError(f"{KV_FLAG} is not JSON: {error}", param="engine_words") from error
    if not isinstance(fields, dict):
        raise RequestError(f"{KV_FLAG} is no JSON object: {given}", param="engine_words")
    return fields


def _check_connector(fields: dict[str, Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = fields["kv_connector"]
    known = sorted(KVConnectorFactory._registry)
    if name not in known and not fields.get("kv_connector_module_path"):
        raise RequestError(f"vLLM has no KV connector {name!r}; it has {', '.join(known)}", param="kv_connector")


def _spec(core: Any, config: Any) -> CoreSpec:
    import vllm

    cache, scheduler, parallel, kv = (
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
        config.kv_transfer_config,
    )
    tensors = core.scheduler.kv_cache_config.kv_cache_tensors
    num_bytes = sum(tensor.size for tensor in tensors) * parallel.tensor_parallel_size
    return CoreSpec(
        version=vllm.__version__,
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1,
        max_num_seqs=scheduler.max_num_seqs,
        max_batched_tokens=scheduler.max_num_batched_tokens,
        max_context_tokens=config.model_config.max_model_len,
        kv_dtype=str(config.model_config.dtype).removeprefix("torch.")
        if cache.cache_dtype == "auto"
        else str(cache.cache_dtype),
        kv_bytes_per_token=num_bytes // max(1, cache.num_gpu_blocks * cache.block_size),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        connector=kv.kv_connector if kv is not None else "",
        handshake=_handshake(core) if kv is not None else "",
        lease_s=float(kv.get_from_extra_config(LEASE_FIELD, 30)) if kv is not None else 0.0,
        has_priorities=scheduler.policy == "priority",
        has_kv_events=cache.enable_prefix_caching and config.kv_events_config.enable_kv_cache_events,
    )


def _handshake(core: Any) -> str:
    return str(core.model_executor.collective_rpc(handshake_digest)[0])


def handshake_digest(worker: Any) -> str:
    """Return, in a vLLM worker, the digest that NIXL's handshake compares ("" for other connectors): it covers vLLM's
    version, the model's path, its shape, the KV dtype, the attention backend and the transfer's direction
    (compute_nixl_compatibility_hash in nixl/metadata.py@0.32.0)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    inner = getattr(get_kv_transfer_group(), "connector_worker", None)
    return getattr(inner, "compat_hash", None) or ""


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
