"""The sampler against a naive one in float64, and its promise: a row is drawn by its own spec alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.request import Sampling
from services.engines.paged.runner import SampleSpec
from services.engines.torch.noise import gumbel, noise_key
from services.engines.torch.sampler import NOT_FINITE, NUM_CANDIDATES, sample

VOCAB_SIZE = 2000


def some_logits(rows: int, seed: int, spread: float = 3.0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def a_spec(
    position: int = 5, history: list[int] | None = None, num_prompt_tokens: int = 1, **more: object
) -> SampleSpec:
    outer = {key: more.pop(key) for key in ("banned", "num_logprobs") if key in more}
    sampling = Sampling(**({"seed": 1} | more))  # type: ignore[arg-type]
    return SampleSpec(
        sampling=sampling,
        position=position,
        history=history or [0],
        num_prompt_tokens=num_prompt_tokens,
        **outer,  # type: ignore[arg-type]
    )


def noise(seed: int, position: int, vocab_size: int = VOCAB_SIZE) -> list[float]:
    key = torch.tensor([noise_key(seed, position)], dtype=torch.int32)
    return list(gumbel(key, torch.arange(vocab_size)[None, :])[0].tolist())


def naive_kept(logits: list[float], sampling: Sampling) -> set[int]:
    """Return the ids that min_p, top_k and top_p keep, each over what the ones before it left."""
    scaled = [value / sampling.temperature for value in logits]
    best = max(scaled)
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    ranked = [i for i in ranked if sampling.min_p == 0 or scaled[i] >= best + math.log(sampling.min_p)]
    ranked = ranked[: sampling.top_k or None]
    weights = [math.exp(scaled[i] - best) for i in ranked]
    kept, mass = set(), 0.0
    for i, weight in zip(ranked, weights, strict=True):
        if mass / sum(weights) >= sampling.top_p and sampling.top_p < 1:
            break
        kept.add(i)
        mass += weight
    return kept


def naive_draw(logits: list[float], sampling: Sampling, position: int) -> int:
    noises = noise(sampling.seed, position, len(logits))
    kept = naive_kept(logits, sampling)
    return max(kept, key=lambda i: logits[i] / sampling.temperature + noises[i])


FILTERS = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.floats(0.2, 2.0),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "top_k": st.one_of(st.just(0), st.integers(1, 40), st.integers(200, VOCAB_SIZE + 50)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FILTERS, min_size=1, max_size=5), st.integers(0, 50), st.sampled_from([0.3, 3.0]))
def test_every_draw_equals_a_naive_one_over_the_whole_vocabulary(
    rows: list[dict[str, float]], seed: int, spread: float
) -> None:
    """A spread of 0.3 makes sets of nearly all 2,000 ids: far wider than the candidates."""
    logits = some_logits(len(rows), seed, spread)
    specs = [a_spec(position=10 + i, **row) for i, row in enumerate(rows)]
    expected = [
        naive_draw(values, spec.sampling, spec.position) for values, spec in zip(logits.tolist(), specs, strict=True)
    ]
    assert [drawn.token_id for drawn in sample(logits.clone(), specs)] == expected


def test_a_row_is_drawn_alike_alone_first_last_and_among_others() -> None:
    logits = some_logits(6, 3)
    specs = [
        a_spec(seed=i, position=i, temperature=t, **filters)
        for i, (t, filters) in enumerate(
            [
                (0.0, {}),
                (1.0, {}),
                (1.5, {"top_p": 0.999}),
                (0.7, {"top_k": 20, "history": [4, 4, 9], "frequency_penalty": 1.0}),
                (1.0, {"min_p": 0.001, "banned": (7,)}),
                (2.0, {"top_p": 0.3, "repetition_penalty": 1.4}),
            ]
        )
    ]
    together = sample(logits.clone(), specs)
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    alone = [sample(logits[i : i + 1].clone(), [spec])[0] for i, spec in enumerate(specs)]
    assert together == backwards == alone


def test_penalties_equal_a_naive_reference() -> None:
    logits = some_logits(1, 8)
    history = [3, 3, 8, 5, 5, 5, 1999, 8]
    naive = logits[0].tolist()
    for token_id in set(history):
        value = naive[token_id]
        naive[token_id] = value / 1.7 if value > 0 else value * 1.7
    for token_id, count in Counter(history[3:]).items():
        naive[token_id] -= 0.6 * count + 0.9
    naive[int(logits[0].argmax())] = -math.inf
    knobs = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.9}
    spec = a_spec(history=history, num_prompt_tokens=3, banned=(int(logits[0].argmax()),), temperature=0.0, **knobs)
    changed = logits.clone()
    (drawn,) = sample(changed, [spec])
    assert changed[0].tolist() == pytest.approx(naive, abs=1e-5)
    assert drawn.token_id == max(range(VOCAB_SIZE), key=lambda i: naive[i])


def test_penalties_of_an_empty_completion_change_nothing() -> None:
    logits = some_logits(1, 9)
    changed = logits.clone()
    sample(changed, [a_spec(history=[1, 2], num_prompt_tokens=2, frequency_penalty=2.0, presence_penalty=2.0)])
    assert torch.equal(changed, logits)


def test_banned_ids_are_never_drawn_even_when_they_are_all_the_mass() -> None:
    logits = torch.full((1, 50), -5.0)
    logits[0, 7] = 40.0
    for position in range(30):
        spec = a_spec(position=position, banned=(7,), top_p=0.5)
        assert sample(logits.clone(), [spec])[0].token_id != 7


def test_banned_ids_outside_the_vocabulary_are_nothing_to_ban() -> None:
    logits = some_logits(1, 2)
    (free,), (banned,) = (sample(logits.clone(), [a_spec(banned=ids)]) for ids in ((), (VOCAB_SIZE, 2**31 - 1)))
    assert free == banned


def test_tokens_come_with_the_probabilities_of_the_model() -> None:
    """Drawn at 20,000 positions from 6 ids: each frequency within 5 standard deviations of its probability."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    num_draws = 20_000
    keys = torch.tensor([noise_key(42, position) for position in range(num_draws)], dtype=torch.int32)
    drawn = (logits.double() + gumbel(keys, torch.arange(6)[None, :])).argmax(dim=1)
    for token_id, probability in enumerate(torch.softmax(logits, 0).tolist()):
        found = int((drawn == token_id).sum()) / num_draws
        assert abs(found - probability) < 5 * math.sqrt(probability * (1 - probability) / num_draws)


def test_sampling_without_filters_draws_what_the_noise_says() -> None:
    logits = some_logits(1, 4)
    for position in range(20):
        (drawn,) = sample(logits.clone(), [a_spec(position=position, seed=9)])
        assert drawn.token_id == naive_draw(logits[0].tolist(), Sampling(seed=9), position)


def test_noise_depends_on_seed_position_and_id_and_looks_like_gumbel() -> None:
    values = torch.tensor(noise(1, 1, 100_000), dtype=torch.float64)
    assert values.isfinite().all()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert noise(1, 1, 50) == values[:50].tolist()
    for seed, position in [(2, 1), (1, 2), (-1, 1), (0, 0)]:
        other = torch.tensor(noise(seed, position, 100_000), dtype=torch.float64)
        assert abs(float(torch.corrcoef(torch.stack([values, other]))[0, 1])) < 0.02


def test_logprobs_are_of_the_raw_distribution_with_the_chosen_token_apart() -> None:
    logits = some_logits(3, 5)
    specs = [
        a_spec(temperature=0.0, banned=(int(logits[0].argmax()),), num_logprobs=2),
        a_spec(temperature=1.0),
        a_spec(temperature=0.0, num_logprobs=0),
    ]
    first, second, third = sample(logits.clone(), specs)
    raw = torch.log_softmax(logits, dim=-1)
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(raw[0, first.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in first.logprobs.top] == raw[0].topk(2).indices.tolist()
    assert first.token_id == first.logprobs.top[1][0]  # the best was banned
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top == ()


def test_a_vocabulary_smaller_than_the_candidate_set_works() -> None:
    logits = some_logits(2, 6, vocab_size=NUM_CANDIDATES // 2)
    specs = [a_spec(position=i, top_p=0.8, top_k=200) for i in range(2)]
    expected = [naive_draw(row, spec.sampling, spec.position) for row, spec in zip(logits.tolist(), specs, strict=True)]
    assert [drawn.token_id for drawn in sample(logits.clone(), specs)] == expected


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_no_token_and_change_nobody_elses(value: str, temperature: float) -> None:
    logits, spec = some_logits(3, 7), a_spec(temperature=temperature, top_p=0.9, num_logprobs=2)
    first, _, third = sample(logits.clone(), [spec] * 3)
    logits[1, 5] = float(value)
    assert sample(logits, [spec] * 3) == [first, NOT_FINITE, third]
    assert "not finite" in NOT_FINITE.reason


def test_a_row_with_everything_banned_has_no_token() -> None:
    logits = some_logits(1, 8, vocab_size=4)
    assert sample(logits, [a_spec(banned=(0, 1, 2, 3))]) == [NOT_FINITE]
