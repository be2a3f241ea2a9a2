"""Starting sglang.Engine in this process; its scheduler and detokenizer are processes of their own. With plugin.py and
thread.py the only modules that import SGLang.
"""

import argparse
import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from schemas.errors import EngineError, RequestError
from schemas.handoff import BootstrapEndpoint
from services.engines.sglang import plugin
from services.engines.sglang.words import EngineSpec, LaunchOptions

MODES = {"prefill": "prefill", "decode": "decode", "both": "null"}
OURS = ("--model", "--model-path", "--disaggregation-mode", "--skip-tokenizer-init", "--tokenizer-worker-num")
UNREAD = "--config"  # a file that SGLang's own program reads, not its parser
OURS_WHY = "is busway's to set, by --model and --role"
WILDCARDS = ("0.0.0.0", "::", "")
FAKE_HOST = "2.2.2.2"  # SGLang's word for: don't transfer any KV, decode from whatever is there
RENDEZVOUS_S = "600"


def start_engine(options: LaunchOptions, kv_events_address: str) -> tuple[Any, EngineSpec]:
    """Load the model and return a running Engine with its spec; takes seconds to minutes. Call it on a thread that
    isn't the main one (SGLang would take over the process's signals) and within that thread's event loop.

    Raises RequestError for words that SGLang refuses or that are busway's, EngineError when it can't start.
    """
    refuse_ours(options.words)
    _set_environment(options)
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.entrypoints.engine import Engine

    with _own_logging():
        arguments = _server_args(options, kv_events_address)
        try:
            engine = Engine(server_args=arguments)
        except (ValueError, TypeError, AssertionError) as error:
            raise RequestError(f"SGLang refuses its arguments: {error}", param="engine_words") from error
        except (RuntimeError, OSError, EOFError) as error:
            raise EngineError(f"SGLang didn't start: {error}") from error
    if missing := plugin.missing():
        raise EngineError(f"this SGLang has no {', '.join(missing)}: busway can't make it keep its promises")
    return engine, _spec(engine, resolved_view(engine.server_args), options)


def refuse_ours(words: Sequence[str]) -> None:
    """Raise RequestError for words that would be replaced by busway's own, or not looked at, without a word. argparse
    takes shortened ones, too; none of SGLang's other flags is the beginning of one of these."""
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        flag = next((one for one in (*OURS, UNREAD) if one.startswith(name)), None)
        if flag is not None and name.startswith("--") and name != "--":
            short = "" if name == flag else f" ({name} for short)"
            why = "is not read here: give its settings as flags" if flag == UNREAD else OURS_WHY
            raise RequestError(f"{flag}{short} {why}", param="engine_words")


def _set_environment(options: LaunchOptions) -> None:
    """Settings that SGLang takes from the environment only; what is there already stays."""
    os.environ[plugin.MARK] = "1"
    os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    os.environ.setdefault("SGLANG_HOST_IP", options.host)
    # How long a leg may wait for the other one's slot: a request's own deadlines are what ends it.
    os.environ.setdefault("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", RENDEZVOUS_S)
    os.environ.setdefault("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", RENDEZVOUS_S)


def _server_args(options: LaunchOptions, kv_events_address: str) -> Any:
    """Return SGLang's ServerArgs: our defaults, then the user's words, then what is busway's."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    words = [*_defaults(options, kv_events_address), *options.words]
    words += ["--model-path", options.model_path, "--disaggregation-mode", MODES[options.role]]
    words += ["--skip-tokenizer-init", "--incremental-streaming-output"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(words)
        arguments = ServerArgs.from_cli_args(parsed)
    except SystemExit:
        raise RequestError(f"SGLang refuses its arguments: {error_of(said.getvalue())}", param="engine_words") from None
    except (ValueError, TypeError, AssertionError) as error:
        raise RequestError(f"SGLang refuses its arguments: {error}", param="engine_words") from error
    if parsed.dp_size > 1:
        raise RequestError("run one busway worker for each data-parallel replica", param="dp_size")
    if parsed.nnodes > 1:
        raise RequestError("an SGLang engine over several nodes can't be a busway worker yet", param="nnodes")
    return arguments


def _defaults(options: LaunchOptions, kv_events_address: str) -> list[str]:
    words = ["--host", options.host, "--log-level", "warning"]
    if options.role != "both":
        words += ["--disaggregation-transfer-backend", "nixl"]
    if options.role == "prefill":
        # A free port is another address at each start: no decode worker takes this one for its dead predecessor.
        words += ["--disaggregation-bootstrap-port", str(_free_port(options.host)), "--enable-metrics"]
    if options.role == "decode" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        words += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]  # its default pins memory for a GPU
    if options.role != "decode":
        events = {"publisher": "zmq", "endpoint": kv_events_address, "format": "dynamo"}
        words += ["--kv-events-config", msgspec.json.encode(events).decode()]
    return words


def error_of(said: str) -> str:
    """Return what argparse says behind its usage, on one line."""
    return " ".join(said.rpartition("error:")[2].split())[:500]


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Keep SGLang from replacing this process's log handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _spec(engine: Any, config: Any, options: LaunchOptions) -> EngineSpec:
    import sglang

    info, model = engine._scheduler_init_result.scheduler_infos[0], engine.tokenizer_manager.model_config
    snapshot = engine.tokenizer_manager.load_snapshot_reader.read_all()[0]
    kv_dtype = str(model.dtype) if config.kv_cache_dtype == "auto" else str(config.kv_cache_dtype)
    return EngineSpec(
        version=sglang.__version__,
        page_size=config.page_size,
        num_tokens=info["max_total_num_tokens"],
        max_running=snapshot.max_running_requests,
        max_batched_tokens=config.chunked_prefill_size
        if config.chunked_prefill_size > 0
        else config.max_prefill_tokens,
        max_context_tokens=info["max_req_input_len"] + 4,
        vocab_size=model.vocab_size,
        kv_dtype=kv_dtype.removeprefix("torch."),
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        device=config.device,
        transfer_backend=config.disaggregation_transfer_backend if options.role != "both" else "",
        endpoint=_endpoint(config) if options.role == "prefill" else None,
        has_priorities=config.enable_priority_scheduling,
        has_seeds=config.sampling_backend == "pytorch" or config.enable_deterministic_inference,
        has_kv_events=bool(config.kv_events_config) and not config.disable_radix_cache,
        has_metrics=config.enable_metrics,
        kv_bytes_per_block=info.get(plugin.BLOCK_BYTES, 0),
    )


def _endpoint(config: Any) -> BootstrapEndpoint:
    from sglang.srt.utils.network import get_local_ip_auto

    host = get_local_ip_auto() if config.host in WILDCARDS else config.host
    if host == FAKE_HOST:
        raise RequestError(f"SGLang transfers no KV from the host {FAKE_HOST}: give another --host", param="host")
    return BootstrapEndpoint(host=host, port=config.disaggregation_bootstrap_port)


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
