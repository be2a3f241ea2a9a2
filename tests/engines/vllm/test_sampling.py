"""What vLLM is asked to draw. vLLM itself is not needed."""

import pytest

from schemas.request import Sampling, StopConditions
from services.engines.paged.limits import Limits
from services.engines.vllm.sampling import sampling_values
from tests.engines.scenes import a_request

LIMITS = Limits(
    num_blocks=8, block_size=32, max_num_seqs=4, max_batched_tokens=64, max_context_tokens=128, eos_token_ids=(2, 0)
)
STOP = StopConditions(max_tokens=9, min_tokens=4, stop_token_ids=(7,))


def test_the_prefill_leg_knows_what_ends_a_request_and_nothing_of_its_length() -> None:
    values = sampling_values(a_request((1, 2), stop=STOP, num_logprobs=3), LIMITS, "prefill")
    assert (values["max_tokens"], values["min_tokens"]) == (1, 1)
    assert values["stop_token_ids"] == [0, 2, 7]
    assert values["logprobs"] == 3
    assert "n" not in values
    assert "stop" not in values


def test_the_decode_leg_gets_what_is_left_after_a_resume() -> None:
    values = sampling_values(a_request((1, 2), stop=STOP, resume=(5, 5)), LIMITS, "decode")
    assert (values["max_tokens"], values["min_tokens"]) == (7, 2)


def test_ignore_eos_leaves_the_users_stop_ids_alone() -> None:
    stop = StopConditions(max_tokens=9, stop_token_ids=(7,), ignore_eos=True)
    assert sampling_values(a_request((1,), stop=stop), LIMITS, "decode")["stop_token_ids"] == [7]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_every_seed_is_one_for_vllm(seed: int) -> None:
    """vLLM takes -1 as no seed."""
    values = sampling_values(a_request((1,), seed=seed, temperature=0.5), LIMITS, "decode")
    assert isinstance(values["seed"], int)
    assert values["seed"] >= 0


def test_every_sampling_parameter_of_ours_reaches_vllm() -> None:
    request = a_request((1,), temperature=0.5)
    values = sampling_values(request, LIMITS, "decode")
    ours = set(Sampling.__struct_fields__) - {"is_user_seeded"}
    assert ours <= set(values)
