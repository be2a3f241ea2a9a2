"""What SGLang is asked to draw. SGLang itself is not needed."""

import msgspec
import pytest

from schemas.errors import RequestError
from schemas.request import Sampling, StopConditions
from services.engines.paged.limits import Limits
from services.engines.sglang.sampling import check_request, sampling_values
from tests.engines.scenes import a_request
from tests.engines.sglang import spec

LIMITS = Limits(
    num_blocks=8,
    block_size=32,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_context_tokens=128,
    eos_token_ids=(2, 0),
    vocab_size=100,
)
STOP = StopConditions(max_tokens=9, min_tokens=4, stop_token_ids=(7,))
SPEC = msgspec.structs.replace(spec.SPEC, has_seeds=True)
UNKNOWN_TO_SGLANG = {"is_user_seeded", "seed"}  # the seed is its sampling_seed


def test_the_cards_eos_ids_are_stop_ids_unless_they_are_ignored() -> None:
    assert sampling_values(a_request((1,), stop=STOP), LIMITS)["stop_token_ids"] == [0, 2, 7]
    ignoring = msgspec.structs.replace(STOP, ignore_eos=True)
    assert sampling_values(a_request((1,), stop=ignoring), LIMITS)["stop_token_ids"] == [7]


def test_a_stop_id_that_no_token_has_never_gets_to_the_scheduler() -> None:
    stop = StopConditions(max_tokens=9, min_tokens=4, stop_token_ids=(99, 100, 2**31 - 1), ignore_eos=True)
    assert sampling_values(a_request((1,), stop=stop), LIMITS)["stop_token_ids"] == [99]


def test_after_a_resume_what_is_left_is_asked_for() -> None:
    values = sampling_values(a_request((1, 2), stop=STOP, resume=(5, 5)), LIMITS)
    assert (values["max_new_tokens"], values["min_new_tokens"]) == (7, 2)


def test_every_sampling_parameter_of_ours_reaches_sglang() -> None:
    request = a_request((1,), temperature=0.5, seed=-3)
    values = sampling_values(request, LIMITS)
    assert set(Sampling.__struct_fields__) - UNKNOWN_TO_SGLANG <= set(values)
    assert values["sampling_seed"] == -3


def test_off_is_said_in_sglangs_words() -> None:
    assert sampling_values(a_request((1,)), LIMITS)["top_k"] == -1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"priority": 1}, "priority"),
        ({"stop": StopConditions(max_tokens=2, min_tokens=3)}, "min_tokens"),
        ({"sampling": Sampling(seed=1, repetition_penalty=2.5)}, "repetition_penalty"),
        ({"resume": (4,), "sampling": Sampling(seed=1, is_user_seeded=True)}, "seed"),
    ],
)
def test_what_it_cant_do_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_request(msgspec.structs.replace(a_request((1,)), **changes), SPEC)
    assert refused.value.param == param


def test_a_users_seed_is_refused_where_the_sampling_backend_ignores_it() -> None:
    deaf = msgspec.structs.replace(SPEC, has_seeds=False)
    seeded = msgspec.structs.replace(a_request((1,)), sampling=Sampling(seed=1, is_user_seeded=True))
    check_request(seeded, SPEC)
    with pytest.raises(RequestError, match="--sampling-backend pytorch"):
        check_request(seeded, deaf)
    check_request(a_request((1,), temperature=0.8), deaf)
