"""From a worker's settings to a TensorRT-LLM engine. Only who asks for one imports the library."""

from services.config import WorkerConfig
from services.engines.model_files import load_card
from services.engines.trtllm.api import load_api
from services.engines.trtllm.args import allows_untested, llm_kwargs, with_words
from services.engines.trtllm.engine import TrtllmEngine


def make_trtllm_engine(config: WorkerConfig) -> TrtllmEngine:
    """Return the engine that `config` describes, not yet loaded.

    Raises RequestError for arguments or a release that won't do, ModuleNotFoundError saying what to install.
    """
    engine_args = with_words(config.engine_args, config.engine_words)
    kwargs = llm_kwargs(engine_args, role=config.role, model_path=config.model_path)
    api = load_api(allow_untested=allows_untested(engine_args))
    card = load_card(config.model_path, config.model)
    return TrtllmEngine(api, kwargs, card, kv_load_failure=config.kv_load_failure)
