"""The first requests of a core, before anybody sends one. Engine's thread only.

What vLLM imports and compiles at its first prefill, decode, draw and logprobs holds the whole process up, on a busy
machine for longer than a worker may be silent: peers would take it for dead, and drop what it was just given.
"""

from services.engines.vllm.stepper import Stepper
from services.engines.vllm.words import CoreRequest, CoreSpec

TOKEN_ID = 0
NUM_TOKENS = 3
DRAWN: dict[str, object] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1, "logprobs": 1}
GREEDY: dict[str, object] = {"temperature": 0.0}


def warm_up(stepper: Stepper, spec: CoreSpec) -> None:
    """Run one greedy and one drawn request to their ends, and leave nothing of them in the prefix cache."""
    length = min(8, spec.max_context_tokens - NUM_TOKENS)
    for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
        values = {**sampling, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
        stepper.submit(CoreRequest(id=f"warm-up-{name}", token_ids=[TOKEN_ID] * length, sampling=values))
        while stepper.has_work():
            report = stepper.step()
            failed = next((one.error for one in report.outputs if one.error is not None), None) if report else None
            if failed is not None:
                raise failed
