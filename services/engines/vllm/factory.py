"""From a worker's settings to a VllmEngine, without importing vLLM: that takes its time and is done at start."""

import socket
from typing import Literal

from schemas.errors import RequestError
from services.config import RoleName, WorkerConfig
from services.engines.adapter.installed import require_version
from services.engines.adapter.words import flags
from services.engines.model_files import load_card
from services.engines.vllm import INSTALL, PACKAGES, TESTED_VERSIONS
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.words import LaunchOptions

LOOPBACK = "127.0.0.1"


def make_vllm(config: WorkerConfig, *, is_one_host: bool) -> VllmEngine:
    """Return the engine that `config` describes, not yet loaded.

    `engine_args` become vLLM's own flags (max_model_len=2048: --max-model-len 2048), but for allow_untested, which is
    the adapter's; `engine_words` follow as they are. Raises RequestError when vLLM isn't here.
    """
    args = dict(config.engine_args)
    allow_untested = args.pop("allow_untested", "false").lower() == "true"
    require_version("vLLM", PACKAGES, TESTED_VERSIONS, install=INSTALL, allow_untested=allow_untested)
    if config.handoff != "pull":
        raise RequestError("vLLM hands over after prefill: --handoff pull", param="handoff")
    if config.lease_s < 1:
        raise RequestError(f"vLLM's leases are whole seconds: lease_s is {config.lease_s:g}", param="lease_s")
    options = LaunchOptions(
        model_path=config.model_path,
        words=(*flags(args), *config.engine_words),
        kv_role=_kv_role(config.role),
        kv_load_failure=config.kv_load_failure,
        lease_s=config.lease_s,
        side_channel_host=LOOPBACK if is_one_host else socket.gethostbyname(socket.gethostname()),
    )
    return VllmEngine(load_card(config.model_path, config.model), options)


def _kv_role(role: RoleName) -> Literal["kv_producer", "kv_consumer"] | None:
    """A worker of role `both` serves whole requests only: it needs no connector."""
    match role:
        case "prefill":
            return "kv_producer"
        case "decode":
            return "kv_consumer"
        case _:
            return None
