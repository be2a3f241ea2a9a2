"""Prompts that stay on decode workers in a replay: of our own engine, and under Dynamo's rules."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.cli import app
from deploy.replay.engine_model import DecodeTimes, PrefillTimes, StepTimes
from deploy.replay.outcome import Outcome
from deploy.replay.router_side import RouterSettings
from deploy.replay.scene import Delays, EngineSize, Scene
from deploy.replay.simulation import Simulation
from deploy.replay.timing import DynamoTiming
from deploy.replay.trace import TraceRequest
from services.router.kv_policy import KvSettings
from services.router.local_prefill import LocalSettings

EXCERPT = Path(__file__).parent / "traces" / "mooncake_synthetic_excerpt.jsonl"
OURS = StepTimes(
    prefill=PrefillTimes(base_s=0.01, token_s=1e-4, pair_s=0.0),
    decode=DecodeTimes(base_s=0.02, sequence_s=1e-3, context_token_s=1e-6),
)
BUS_S = 0.001
LATER_S = 10.0


def scene(timing: StepTimes | DynamoTiming, *, is_on: bool = True, num_blocks: int = 16384) -> Scene:
    local = LocalSettings(is_on=is_on, handoff_s=0.0 if isinstance(timing, DynamoTiming) else 2 * BUS_S)
    return Scene(
        num_prefill=2,
        num_decode=2,
        router=RouterSettings(kv=KvSettings(local=local)),
        size=EngineSize(num_blocks=num_blocks, max_batched_tokens=2048),
        timing=timing,
        delays=Delays(bus_s=BUS_S),
    )


def asked(num_tokens: int, max_tokens: int = 2, *, at_s: float = 0.0, first_piece: int = 0) -> TraceRequest:
    pieces = tuple(range(first_piece, first_piece + -(-num_tokens // 512)))
    return TraceRequest(arrival_s=at_s, num_prompt_tokens=num_tokens, max_tokens=max_tokens, pieces=pieces)


def replayed(scene: Scene, *requests: TraceRequest) -> Outcome:
    simulation = Simulation(scene)
    outcome = simulation.run(requests)
    simulation.check_empty()
    assert simulation.index_drift() == 0
    return outcome


FIRST = asked(5000)
"""Goes to prefill, because nobody has measured anything; afterwards somebody has."""


def test_a_short_prompt_stays_on_an_idle_decode_worker_and_saves_the_handoffs_hops() -> None:
    short = asked(100, at_s=LATER_S, first_piece=50)
    on, off = (replayed(scene(OURS, is_on=is_on), FIRST, short) for is_on in (True, False))
    assert (on.num_local, off.num_local) == (1, 0)
    assert on.ttft_ms()[1] == pytest.approx(1e3 * (BUS_S + 0.01 + 100 * 1e-4))
    assert off.ttft_ms()[1] == pytest.approx(1e3 * (3 * BUS_S + 0.01 + 100 * 1e-4))


def test_a_long_prompt_stays_only_when_decode_has_most_of_it() -> None:
    again, other = asked(5000, at_s=LATER_S), asked(5000, at_s=2 * LATER_S, first_piece=50)
    outcome = replayed(scene(OURS), FIRST, again, other)
    assert outcome.num_local == 1
    assert outcome.num_cached_tokens == 4992 - 4992 % 64


def test_a_running_stream_is_stolen_no_long_step() -> None:
    stream = asked(100, 3000, at_s=LATER_S, first_piece=50)
    busy = msgspec.structs.replace(scene(OURS), num_decode=1)
    middling = asked(600, at_s=LATER_S + 2.0, first_piece=60)
    assert replayed(busy, FIRST, stream, middling).num_local == 1
    assert replayed(busy, FIRST, middling).num_local == 1


def test_under_dynamos_rules_a_prompt_is_computed_with_the_pass_that_it_joins() -> None:
    timing = DynamoTiming()
    short = asked(100, at_s=LATER_S, first_piece=50)
    queued = [asked(8000, at_s=LATER_S - 0.001, first_piece=100 * number) for number in range(1, 5)]
    outcome = replayed(scene(timing), FIRST, *queued, short)
    assert outcome.num_local == 1
    expected = timing.prefill_s(100) + timing.decode_s(100)
    assert float(outcome.ttft_ms().min()) == pytest.approx(1e3 * expected, rel=0.02)
    assert replayed(scene(timing, is_on=False), FIRST, *queued, short).ttft_ms().min() > 2e3 * expected


requests_strategy = st.lists(
    st.tuples(st.floats(0.0, 0.4), st.integers(1, 2000), st.integers(1, 60), st.sampled_from([0, 0, 10, 20])),
    min_size=1,
    max_size=12,
)


@given(requests_strategy, st.sampled_from([OURS, DynamoTiming()]), st.integers(50, 90))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_in_pools_that_are_too_small(
    several: list[tuple[float, int, int, int]], timing: StepTimes | DynamoTiming, num_blocks: int
) -> None:
    now, requests = 0.0, [asked(64)]
    for gap_s, num_tokens, max_tokens, base in several:
        now += gap_s
        requests.append(asked(num_tokens, max_tokens, at_s=1.0 + now, first_piece=base))
    outcome = replayed(scene(timing, num_blocks=num_blocks), *requests)
    assert outcome.num_done == len(requests)
    assert len(outcome.ttft_ms()) == len(requests)
    assert outcome.num_prompt_tokens == sum(one.num_prompt_tokens for one in requests)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dynamo", "torch"])
def test_the_command_has_a_flag_for_it_and_off_is_as_without(model: str) -> None:
    arguments = ["replay", str(EXCERPT), "--speed", "2", "--engine-model", model, "--blocks", "16384", "--json"]
    on, off, without = (
        json.loads(CliRunner().invoke(app, [*arguments, *flags]).stdout)
        for flags in (["--local-prefill", "--max-local-tokens", "100000"], ["--no-local-prefill"], [])
    )
    for shown in (on, off, without):
        del shown["wall_s"], shown["peak_mib"]
    assert off == without
    assert off["stayed_on_decode"] == 0
    assert on["stayed_on_decode"] > 0
