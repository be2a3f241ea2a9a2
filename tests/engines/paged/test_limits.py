"""What can never be served is refused at once, with the numbers."""

import pytest

from schemas.errors import RequestError
from services.engines.paged.limits import Limits
from tests.engines.scenes import a_request

LIMITS = Limits(num_blocks=4, block_size=4, max_num_seqs=2, max_batched_tokens=8, max_context_tokens=32, vocab_size=100)


@pytest.mark.parametrize("where", ["prompt", "resume"])
def test_an_id_outside_the_vocabulary_is_refused_by_every_order(where: str) -> None:
    request = a_request([1, 100]) if where == "prompt" else a_request([1], resume=(2, 100))
    for check in (LIMITS.check, LIMITS.check_decode, LIMITS.check_hold):
        with pytest.raises(RequestError, match="token id 100 is outside the vocabulary of 100 ids"):
            check(request)


def test_the_last_id_of_the_vocabulary_is_fine() -> None:
    LIMITS.check_decode(a_request([1, 99], max_tokens=2))


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match="need 5 KV blocks of 4 tokens; this worker has 4"):
        LIMITS.check_decode(a_request(range(10), max_tokens=10))
