"""From a worker's settings to a SglangEngine, without importing SGLang: that takes its time and is done at start."""

import socket

from schemas.errors import RequestError
from services.config import WorkerConfig
from services.engines.adapter.installed import require_version
from services.engines.adapter.words import flags
from services.engines.model_files import load_card
from services.engines.sglang import INSTALL, PACKAGES, TESTED_VERSIONS
from services.engines.sglang.engine import SglangEngine
from services.engines.sglang.words import LaunchOptions

LOOPBACK = "127.0.0.1"


def make_sglang(config: WorkerConfig, *, is_one_host: bool) -> SglangEngine:
    """Return the engine that `config` describes, not yet loaded.

    `engine_args` become SGLang's own flags (context_length=2048: --context-length 2048), but for allow_untested, which
    is the adapter's; `engine_words` follow as they are. Raises RequestError when SGLang isn't here.
    """
    args = dict(config.engine_args)
    allow_untested = args.pop("allow_untested", "false").lower() == "true"
    require_version("SGLang", PACKAGES, TESTED_VERSIONS, install=INSTALL, allow_untested=allow_untested)
    if config.lease_s <= 0:
        raise RequestError(f"lease_s must be above 0, not {config.lease_s:g}", param="lease_s")
    options = LaunchOptions(
        model_path=config.model_path,
        words=(*flags(args), *config.engine_words),
        role=config.role,
        host=LOOPBACK if is_one_host else socket.gethostbyname(socket.gethostname()),
    )
    return SglangEngine(load_card(config.model_path, config.model), options, lease_s=config.lease_s)
