"""The measured engine: its times are fitted rightly, its file is read strictly."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.replay.engine_model import (
    TORCH_MODEL,
    DecodeTimes,
    EngineModelError,
    PrefillTimes,
    StepTimes,
    decode_features,
    fit,
    prefill_features,
    read_engine_model,
)
from schemas.ids import AttemptId
from services.engines.paged.planner import StepPlan
from services.engines.paged.runner import Slice

TIMES = StepTimes(
    prefill=PrefillTimes(base_s=0.01, token_s=1e-3, pair_s=1e-6),
    decode=DecodeTimes(base_s=0.02, sequence_s=2e-3, context_token_s=1e-5),
)


def plan(decodes: list[int], chunks: list[tuple[int, int]]) -> StepPlan:
    steps = [*((1, context - 1) for context in decodes), *chunks]
    slices = [
        Slice(attempt_id=AttemptId("a"), token_ids=[1] * length, start=start, block_table=[], sample=None)
        for length, start in steps
    ]
    return StepPlan(slices=slices, sequences=[], num_decodes=len(decodes))


def test_a_step_takes_one_base_and_what_each_part_adds() -> None:
    assert TIMES.step_s(plan([], [(100, 0)])) == pytest.approx(0.01 + 0.1 + 5000e-6)
    assert TIMES.step_s(plan([], [(100, 50), (10, 0)])) == pytest.approx(0.01 + 0.11 + 10_050e-6)
    assert TIMES.step_s(plan([1000, 500], [])) == pytest.approx(0.02 + 0.004 + 0.015)
    assert TIMES.step_s(plan([1000], [(100, 0)])) == pytest.approx(0.02 + 0.002 + 0.01 + 0.1 + 5000e-6)


factors = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


@given(factors, factors, factors)
@settings(deadline=None)
def test_a_fit_finds_the_factors_that_made_the_times(base: float, token: float, pair: float) -> None:
    chunks = [[(length, start)] for length in (16, 64, 512) for start in (0, 512, 4096)]
    features = [prefill_features(one) for one in chunks]
    seconds = [1e-9 + base + token * tokens + pair * pairs for _, tokens, pairs in features]
    found, misfit = fit(features, seconds)
    assert min(found) >= 0.0
    assert misfit < 1e-3
    for (_, tokens, pairs), expected in zip(features, seconds, strict=True):
        assert found[0] + found[1] * tokens + found[2] * pairs == pytest.approx(expected, rel=0.01, abs=1e-8)


def test_a_fit_never_makes_time_negative() -> None:
    features = [decode_features([context]) for context in (10, 100, 1000)]
    found, _ = fit(features, [1.0, 0.9, 0.5])
    assert min(found) >= 0.0


def test_the_checked_in_measurement_says_of_what_it_is_and_fits_its_points() -> None:
    model = read_engine_model(TORCH_MODEL)
    assert "torch" in model.engine
    assert model.machine
    assert model.date
    assert len(model.prefill_points) > 10
    assert len(model.decode_points) > 10
    assert max(model.prefill_misfit, model.decode_misfit) < 0.25
    chunks, seconds = max(model.prefill_points, key=lambda point: point[1])
    assert model.times.step_s(plan([], chunks)) == pytest.approx(seconds, rel=0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": 3}, "machine"),
        ({"threads": 0}, "threads"),
        ({"gpu": "none"}, "gpu"),
        ({"times": {"prefill": {"base_s": -1.0, "token_s": 0.0, "pair_s": 0.0}}}, "base_s"),
    ],
)
def test_a_file_that_is_no_engine_model_is_refused_by_its_field(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(TORCH_MODEL.read_bytes()) | change))
    with pytest.raises(EngineModelError, match=words):
        read_engine_model(path)
    path.write_text("{")
    with pytest.raises(EngineModelError):
        read_engine_model(path)
