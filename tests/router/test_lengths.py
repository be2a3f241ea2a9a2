"""The router judges a request's length as the engine does that gets it."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RequestError
from schemas.request import GenerateRequest, StopConditions
from services.engines.paged.limits import Limits
from services.lengths import Lengths
from tests.router.conftest import a_config, a_request


def engine_takes(limits: Limits, request: GenerateRequest, *, is_decode: bool) -> bool:
    try:
        if is_decode:
            limits.check_decode(request)
        else:
            limits.check_hold(request)
    except RequestError:
        return False
    return True


@given(
    num_prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    num_resumed=st.integers(0, 39),
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 8),
    max_context=st.integers(2, 64),
)
def test_who_fits_is_who_would_not_refuse(
    num_prompt: int, max_tokens: int, num_resumed: int, num_blocks: int, block_size: int, max_context: int
) -> None:
    num_resumed = min(num_resumed, max_tokens - 1)
    request = msgspec.structs.replace(
        a_request(num_prompt, resume=(1,) * num_resumed), stop=StopConditions(max_tokens=max_tokens)
    )
    limits = Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_context_tokens=max_context,
    )
    config = msgspec.structs.replace(
        a_config("w", "both"), total_kv_blocks=num_blocks, block_size=block_size, max_context_tokens=max_context
    )
    lengths = Lengths.of(request)
    assert lengths.fit_prefill(config) == engine_takes(limits, request, is_decode=False)
    assert lengths.fit_decode(config) == engine_takes(limits, request, is_decode=True)
    if num_prompt + max_tokens <= config.longest_sequence_tokens:  # what gateways let in
        assert lengths.fit_prefill(config)
        assert lengths.fit_decode(config)
