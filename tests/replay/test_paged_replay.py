"""The replay of our own engine: its scheduler and blocks, at measured speed, in virtual time."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.cli import app
from deploy.replay.engine_model import TORCH_MODEL, DecodeTimes, PrefillTimes, StepTimes
from deploy.replay.outcome import Outcome, as_json
from deploy.replay.router_side import ReplayPolicy, RouterSettings
from deploy.replay.scene import Delays, EngineSize, Scene
from deploy.replay.simulation import Simulation
from deploy.replay.trace import TraceRequest, read_trace

EXCERPT = Path(__file__).parent / "traces" / "mooncake_synthetic_excerpt.jsonl"
TIMES = StepTimes(
    prefill=PrefillTimes(base_s=0.01, token_s=1e-4, pair_s=0.0),
    decode=DecodeTimes(base_s=0.02, sequence_s=1e-3, context_token_s=1e-6),
)
BUS_S = 0.001


def scene(num_prefill: int, num_decode: int, policy: ReplayPolicy = "kv", num_blocks: int = 16384) -> Scene:
    return Scene(
        num_prefill=num_prefill,
        num_decode=num_decode,
        router=RouterSettings(policy=policy),
        size=EngineSize(num_blocks=num_blocks, max_batched_tokens=2048),
        timing=TIMES,
        delays=Delays(bus_s=BUS_S),
    )


def asked(num_tokens: int, max_tokens: int = 2, *, at_s: float = 0.0, first_piece: int = 0) -> TraceRequest:
    pieces = tuple(range(first_piece, first_piece + -(-num_tokens // 512)))
    return TraceRequest(arrival_s=at_s, num_prompt_tokens=num_tokens, max_tokens=max_tokens, pieces=pieces)


def replayed(scene: Scene, *requests: TraceRequest) -> Outcome:
    simulation = Simulation(scene)
    outcome = simulation.run(requests)
    simulation.check_empty()
    if scene.router.policy == "kv":
        assert simulation.index_drift() == 0
    return outcome


def test_a_lone_prompts_first_token_comes_after_its_passes_and_three_hops() -> None:
    outcome = replayed(scene(1, 1), asked(5000, 3))
    assert outcome.ttft_ms().tolist() == pytest.approx([3 * 0.01e3 + 500 + 3 * BUS_S * 1e3])
    assert outcome.gap_ms().tolist() == pytest.approx([21 + 5.001, 21 + 5.002])


def test_a_transfer_takes_the_time_of_what_decode_lacks() -> None:
    moving = msgspec.structs.replace(scene(1, 1), kv_bytes_per_token=1000, gb_per_s=0.01)
    first, again = asked(6400), asked(6400, at_s=100.0)
    ttft_ms = replayed(moving, first, again).ttft_ms().tolist()
    assert ttft_ms[0] == pytest.approx(4 * 10 + 640 + 3 + 640)
    # All but the last block is cached on both sides: decode's own copy isn't sent again.
    assert ttft_ms[1] == pytest.approx(10 + 6.4 + 3 + 6.4)


def test_a_request_of_one_token_has_no_decode_leg() -> None:
    outcome = replayed(scene(1, 1), asked(1000, 1))
    assert outcome.ttft_ms().tolist() == pytest.approx([10 + 100 + BUS_S * 1e3])
    assert outcome.num_done == 1
    assert [name for name in outcome.loads if name.startswith("decode")] == []


def test_a_request_larger_than_a_pool_is_refused_and_counted() -> None:
    outcome = replayed(scene(1, 1, num_blocks=10), asked(10 * 64, 1), asked(10 * 64 + 1, 1), asked(64, 10 * 64))
    assert (outcome.num_done, outcome.num_refused) == (1, 2)


requests_strategy = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.5]),
        st.integers(1, 3000),
        st.integers(1, 100),
        st.sampled_from([0, 0, 10, 20]),
    ),
    min_size=1,
    max_size=12,
)


@given(requests_strategy, st.sampled_from(["kv", "round_robin", "least_loaded"]), st.integers(50, 90))
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_in_pools_that_are_too_small(
    several: list[tuple[float, int, int, int]], policy: ReplayPolicy, num_blocks: int
) -> None:
    now, requests = 0.0, []
    for gap_s, num_tokens, max_tokens, base in several:
        now += gap_s
        requests.append(asked(num_tokens, max_tokens, at_s=now, first_piece=base))
    outcome = replayed(scene(2, 2, policy, num_blocks=num_blocks), *requests)
    assert outcome.num_done == len(requests)
    assert len(outcome.ttft_ms()) == len(requests)
    assert int(outcome.gap_weights().sum()) == sum(one.max_tokens - 1 for one in requests)


def test_the_kv_policy_finds_prefixes_that_round_robin_misses() -> None:
    requests = read_trace(EXCERPT)
    ours, blind = (replayed(scene(6, 2, policy), *requests) for policy in ("kv", "round_robin"))
    assert ours.prefix_reuse > blind.prefix_reuse + 0.1
    assert ours.ttft().mean < 0.9 * blind.ttft().mean


def test_replays_are_reproducible() -> None:
    requests = read_trace(EXCERPT, speed=4.0)
    first, second = (as_json(replayed(scene(2, 2), *requests)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("model", ["dynamo", "torch"])
def test_a_thousand_workers_share_a_slice_of_a_trace(model: str) -> None:
    arguments = ["replay", str(EXCERPT), "--prefill", "500", "--decode", "500", "--speed", "2", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--engine-model", model, "--blocks", "16384"])
    shown = json.loads(result.stdout)
    assert shown["requests"] == 48
    assert shown["prefix_reuse"] > 0.3
    assert shown["peak_mib"] > 0


def test_the_command_plays_a_measurement_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    measured = msgspec.json.decode(TORCH_MODEL.read_bytes())
    measured["times"]["prefill"] = {"base_s": 1.0, "token_s": 0.0, "pair_s": 0.0}
    mine.write_bytes(msgspec.json.encode(measured))
    arguments = ["replay", str(EXCERPT), "--requests", "1", "--speed", "0.01", "--blocks", "16384", "--json"]
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--engine-model", str(mine)]).stdout)
    assert shown["ttft_ms"]["mean"] >= 1000
    result = CliRunner().invoke(app, [*arguments, "--engine-model", "tensor"])
    assert result.exit_code != 0
    mine.write_text("{}")
    result = CliRunner().invoke(app, [*arguments, "--engine-model", str(mine)])
    assert "mine.json" in str(result.exception)
