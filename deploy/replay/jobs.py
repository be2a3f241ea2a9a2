"""One request on its way through the modelled workers."""

import msgspec

from deploy.replay.trace import TraceRequest
from services.prefix_hash import BlockHashes


class Job(msgspec.Struct, kw_only=True):
    """`num_computed`: prompt tokens with KV, cached ones included; `num_cached`: the prefix hit of its admission.
    `expected_cached`: what the router took for cached when it sent the prompt. `published` are the hashes of the
    blocks it references, beside `num_private` blocks without one. `is_local`: a decode worker computes the prompt, no
    prefill worker does. Times in virtual seconds.
    """

    number: int
    request: TraceRequest
    hashes: BlockHashes
    keys: list[int] = []
    dispatch: int = 0
    expected_cached: int = 0
    num_computed: int = 0
    num_cached: int = -1
    published: list[int] = []
    num_private: int = 0
    is_local: bool = False
    prefill_worker: int = -1
    decode_worker: int = -1
    expected_at: float = 0.0
    prefilled_at: float = 0.0
    decode_dispatch: int = 0
    num_emitted: int = 0
    was_preempted: bool = False
    last_token_at: float = -1.0
    first_token_s: float = -1.0

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Prompt tokens still to be computed."""
        return self.request.num_prompt_tokens - self.num_computed
