"""What a stand-in of SGLang's engine says of itself, and how it was started."""

from services.engines.sglang.words import EngineSpec, LaunchOptions

SPEC = EngineSpec(
    version="0",
    page_size=16,
    num_tokens=160,
    max_running=4,
    max_batched_tokens=64,
    max_context_tokens=64,
    vocab_size=8,
    kv_dtype="float32",
    tp_size=1,
    pp_size=1,
    device="cpu",
    transfer_backend="nixl",
    endpoint=None,
    has_priorities=False,
    has_seeds=False,
    has_kv_events=False,
    has_metrics=False,
    kv_bytes_per_block=0,
)
OPTIONS = LaunchOptions(model_path="/m", words=(), role="both", host="127.0.0.1")
