"""From a worker's engine arguments to the keyword arguments of tensorrt_llm.LLM, verbatim.

`name=value`: a value that is JSON is that value, anything else a string. So `tensor_parallel_size=2`,
`cache_transceiver_config={"backend":"NIXL","kv_transfer_timeout_ms":20000}` and `dtype=bfloat16` are what they look
like; `revision="7"` is the string. LLM checks the names itself and refuses unknown ones [L].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schemas.errors import RequestError
from services.config import RoleName

TRANSCEIVER = "cache_transceiver_config"
ALLOW_UNTESTED = "allow_untested"
STATISTICS = "enable_iter_perf_stats"
OURS = frozenset({"model", "tokenizer", "skip_tokenizer_init"})


def llm_kwargs(engine_args: Mapping[str, str], *, role: RoleName, model_path: str) -> dict[str, Any]:
    """Return LLM's keyword arguments; `allow_untested` is busway's and isn't one. Iteration statistics are on unless
    they are switched off: they are how the engine's own loop says that it gets on, and how much KV is in use.

    Raises RequestError for arguments that are busway's, and for a prefill or decode worker without a KV transceiver
    (None is off [A]: its handoffs could never work).
    """
    if not model_path:
        raise RequestError("the engine trtllm needs a model folder: --model FOLDER", param="model_path")
    kwargs = {name: _value(text) for name, text in engine_args.items() if name != ALLOW_UNTESTED}
    if taken := sorted(OURS & kwargs.keys()):
        raise RequestError(f"{taken[0]} is set by busway, not by an engine argument", param=taken[0])
    if role != "both" and not kwargs.get(TRANSCEIVER):
        raise RequestError(
            f"a {role} worker hands KV over: give the engine argument {TRANSCEIVER}, "
            'such as {"backend":"NIXL","kv_transfer_timeout_ms":20000}',
            param=TRANSCEIVER,
        )
    return {STATISTICS: True, **kwargs, "model": model_path, "skip_tokenizer_init": True}


def with_words(engine_args: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Return the arguments with those after `--` on the command line: `--name value`, `--name=value`, or `--name`
    alone for true. Raises RequestError for anything else."""
    found = dict(engine_args)
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise RequestError(f"engine arguments are --name value, not {word!r}", param="engine_words")
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            value = left.pop(0) if left and not left[0].startswith("--") else "true"
        found[name.replace("-", "_")] = value
    return found


def allows_untested(engine_args: Mapping[str, str]) -> bool:
    """Return whether any release of TensorRT-LLM shall do."""
    return _value(engine_args.get(ALLOW_UNTESTED, "false")) is True


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
