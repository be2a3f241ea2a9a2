"""The sim model as a runner: its arguments, its KV bytes and its latencies."""

import ctypes
import time

import pytest
from msgspec import structs

from schemas.errors import RequestError
from schemas.request import Sampling
from services.engines.paged.runner import Sampled, SampleSpec, Slice
from services.engines.sim.card import builtin_card
from services.engines.sim.runner import SimRunner
from tests.engines.scenes import WORD_IDS, allocate

BLOCKS = [3, 1, 5, 0]


def a_runner(**engine_args: object) -> SimRunner:
    runner = SimRunner({"num_blocks": "8", "block_size": "4"} | {k: str(v) for k, v in engine_args.items()})
    runner.load(allocate)
    return runner


def a_slice(ids: list[int], start: int, end: int, *, sampling: Sampling | None = None, **spec: object) -> Slice:
    sample = None
    if end == len(ids):
        sample = SampleSpec(
            sampling=sampling or Sampling(seed=1, temperature=0.0),
            position=end,
            history=ids,
            num_prompt_tokens=len(ids) - 1,
            **spec,
        )
    return Slice(attempt_id="a", token_ids=ids[start:end], start=start, block_table=BLOCKS, sample=sample)


def draw(runner: SimRunner, ids: list[int], cut: int = 0, **spec: object) -> int:
    """Compute `ids` in two chunks (one if cut is 0) and return the token after them."""
    if cut:
        assert runner.execute([a_slice(ids, 0, cut)]) == [None]
    (sampled,) = runner.execute([a_slice(ids, cut, len(ids), **spec)])
    assert isinstance(sampled, Sampled)
    return sampled.token_id


@pytest.mark.parametrize("kv_bytes_per_token", [16, 64])
def test_the_token_does_not_depend_on_where_the_prompt_was_cut(kv_bytes_per_token: int) -> None:
    ids = WORD_IDS[:14]
    expected = draw(a_runner(), ids)
    for cut in range(1, 14):
        assert draw(a_runner(kv_bytes_per_token=kv_bytes_per_token), ids, cut) == expected


@pytest.mark.parametrize("kv_bytes_per_token", [16, 64])
def test_every_byte_of_the_kv_counts(kv_bytes_per_token: int) -> None:
    runner, ids = a_runner(kv_bytes_per_token=kv_bytes_per_token), WORD_IDS[:14]
    runner.execute([a_slice(ids, 0, 13)])
    region = runner.region()
    memory = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
    before, clean = bytes(memory), draw(runner, ids, 0)
    seen = set()
    row_bytes = region.layout.row_bytes
    used = [
        half * region.num_blocks * row_bytes + block * row_bytes + byte
        for half in (0, 1)
        for block in BLOCKS[:3]
        for byte in range(row_bytes)
    ]
    for address in used:
        memory[:] = before
        memory[address] ^= 0x41
        (sampled,) = runner.execute([a_slice(ids, 13, 14)])
        assert sampled is not None
        seen.add(sampled.token_id)
    memory[:] = before
    (sampled,) = runner.execute([a_slice(ids, 13, 14)])
    assert sampled is not None
    assert sampled.token_id == clean
    assert len(seen) > 100


def test_the_seed_matters_when_and_only_when_the_temperature_does() -> None:
    ids = WORD_IDS[:5]
    for temperature, top_k, num_outcomes in ((0.0, 0, 1), (1.0, 1, 1), (1.0, 0, 10)):
        samplings = [Sampling(seed=seed, temperature=temperature, top_k=top_k) for seed in range(-5, 7)]
        drawn = {draw(a_runner(), ids, sampling=sampling) for sampling in samplings}
        assert (len(drawn) == 1) if num_outcomes == 1 else (len(drawn) >= num_outcomes)


def test_banned_ids_are_not_drawn() -> None:
    ids = WORD_IDS[:5]
    first = draw(a_runner(), ids)
    second = draw(a_runner(), ids, banned=(first,))
    assert second not in (first, 0, 2)
    assert draw(a_runner(eos_one_in=1), ids) == 2
    assert draw(a_runner(eos_one_in=1), ids, banned=(2,)) == first


def test_a_given_card_lends_its_vocabulary_without_the_special_ids() -> None:
    card = structs.replace(builtin_card("named"), digest="another", vocab_size=300, max_context_tokens=64)
    runner = SimRunner({}, card)
    spec = runner.load(allocate)
    assert (spec.card.model, spec.card.digest, spec.max_context_tokens) == ("named", "another", 64)
    drawn = {draw(runner, [seed, 5, 6]) for seed in range(10, 400)}
    assert min(drawn) >= 3
    assert max(drawn) < 300
    assert len(drawn) > 150


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"prefil_ms_per_token": "1"}, "prefil_ms_per_token"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"num_blocks": "0"}, "num_blocks"),
        ({"decode_ms_per_step": "-1"}, "decode_ms_per_step"),
        ({"kv_bytes_per_token": "24"}, "kv_bytes_per_token"),
        ({"pause_dir": "/nowhere/at/all"}, "pause_dir"),
    ],
)
def test_arguments_it_cannot_honour_are_refused_by_name(engine_args: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SimRunner(engine_args)


def test_a_step_takes_as_long_as_its_prompt_tokens_and_its_decodes_say() -> None:
    runner, ids = a_runner(prefill_ms_per_token=3, decode_ms_per_step=7), WORD_IDS[:11]

    def seconds(*slices: Slice) -> float:
        started = time.perf_counter()
        runner.execute(list(slices))
        return time.perf_counter() - started

    assert 0.030 <= seconds(a_slice(ids, 0, 10)) < 0.3
    assert 0.007 <= seconds(a_slice(ids, 10, 11)) < 0.3
    assert 0.037 <= seconds(a_slice(ids, 10, 11), a_slice(ids, 0, 10)) < 0.3


def test_loading_takes_as_long_as_it_is_told() -> None:
    started = time.perf_counter()
    SimRunner({"load_ms": "20"}).load(allocate)
    assert time.perf_counter() - started >= 0.020
