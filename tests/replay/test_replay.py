"""The replay keeps Dynamo's rules to the digit where they are known, and loses nothing under any load."""

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.cli import app
from deploy.replay.outcome import LoadOverTime, Outcome, as_json, spread
from deploy.replay.router_side import ReplayPolicy, RouterSettings
from deploy.replay.scene import Delays, EngineSize, Scene
from deploy.replay.simulation import Simulation
from deploy.replay.timing import DynamoTiming
from deploy.replay.trace import TraceError, TraceRequest, read_trace

EXCERPT = Path(__file__).parent / "traces" / "mooncake_synthetic_excerpt.jsonl"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""


def scene(num_prefill: int, num_decode: int, policy: ReplayPolicy = "round_robin", num_blocks: int = 16384) -> Scene:
    return Scene(
        num_prefill=num_prefill,
        num_decode=num_decode,
        router=RouterSettings(policy=policy),
        size=EngineSize(num_blocks=num_blocks),
        timing=DynamoTiming(pool_tokens=num_blocks * 64),
    )


def asked(*num_tokens: int, at_s: float = 0.0, max_tokens: int = 2, first_piece: int = 0) -> list[TraceRequest]:
    """Requests at one time that share nothing."""
    requests = []
    for tokens in num_tokens:
        pieces = range(first_piece, first_piece + -(-tokens // 512))
        first_piece = pieces.stop
        requests.append(
            TraceRequest(arrival_s=at_s, num_prompt_tokens=tokens, max_tokens=max_tokens, pieces=tuple(pieces))
        )
    return requests


def replayed(scene: Scene, requests: list[TraceRequest]) -> Outcome:
    return Simulation(scene).run(requests)


def test_a_lone_prompt_takes_its_prefill_and_one_decode_step() -> None:
    # Measured on Dynamo's 1.6.1 wheel: f(1000) + g(1000), then g(1001).
    outcome = replayed(scene(1, 1), asked(1000))
    assert outcome.ttft_ms().tolist() == pytest.approx([37.8973], abs=1e-3)
    assert outcome.gap_ms().tolist() == pytest.approx([5.7915], abs=1e-3)


def test_a_long_prompt_is_computed_in_passes_of_the_budget() -> None:
    outcome = replayed(scene(1, 1), asked(20_000))
    assert outcome.ttft_ms()[0] == pytest.approx(415.183 + DynamoTiming().decode_s(20_000) * 1e3, abs=1e-2)


def test_prompts_that_come_together_share_passes() -> None:
    outcome = replayed(scene(1, 1), asked(5000, 5000, 5000, max_tokens=1))
    step_s = DynamoTiming().decode_s
    assert outcome.ttft_ms()[0] == pytest.approx(169.137 + step_s(5000) * 1e3, abs=1e-2)
    second_pass = DynamoTiming().prefill_s(6808) * 1e3
    assert outcome.ttft_ms()[2] == pytest.approx(169.137 + second_pass + step_s(10_000) * 1e3, abs=1e-2)


def test_a_prompt_cached_as_a_whole_computes_its_last_block_again() -> None:
    requests = asked(2048) + asked(2048, at_s=10.0)
    outcome = replayed(scene(1, 1), requests)
    assert outcome.num_cached_tokens == 1984


def test_a_transfer_takes_its_bytes_time() -> None:
    # Measured on the wheel: 131072 B a token at 64 GB/s, 20,000 tokens: 40.96 ms.
    without = replayed(scene(1, 1), asked(20_000)).ttft_ms()[0]
    moving = msgspec.structs.replace(scene(1, 1), kv_bytes_per_token=131_072, gb_per_s=64.0)
    assert replayed(moving, asked(20_000)).ttft_ms()[0] - without == pytest.approx(40.96, abs=1e-3)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "speed", "num_blocks", "tolerance", "ttft_ms", "p99_ms", "itl_ms", "reuse"),
    [
        # Replayed by Dynamo 1.6.1 (run_mocker_trace_replay, offline, round_robin) from the same file.
        (4, 4, 2.0, 16384, 1e-4, 606.8382, 2362.9352, 6.6724, 0.3342),
        (6, 2, 2.0, 16384, 1e-4, 522.1501, 1588.3809, 7.2250, 0.1537),
        (2, 1, 8.0, 16384, 1e-4, 3543.5682, 6686.5937, 8.1924, 0.3968),
        (2, 1, 8.0, 3000, 0.02, 3706.7441, 7797.5420, 24.5199, 0.3486),
        (1, 1, 20.0, 2200, 0.02, 10468.1174, 18694.9249, 18.9069, 0.2092),
    ],
)
def test_round_robin_on_a_slice_of_a_trace_gives_dynamos_figures(
    num_prefill: int,
    num_decode: int,
    speed: float,
    num_blocks: int,
    tolerance: float,
    ttft_ms: float,
    p99_ms: float,
    itl_ms: float,
    reuse: float,
) -> None:
    outcome = replayed(scene(num_prefill, num_decode, num_blocks=num_blocks), read_trace(EXCERPT, speed=speed))
    assert outcome.num_done == 48
    assert outcome.ttft().mean == pytest.approx(ttft_ms, rel=tolerance)
    assert outcome.ttft().p99 == pytest.approx(p99_ms, rel=max(tolerance, 2e-3))
    assert outcome.itl().mean == pytest.approx(itl_ms, rel=tolerance)
    assert outcome.prefix_reuse == pytest.approx(reuse, abs=1e-4)


def test_the_kv_policy_finds_prefixes_that_round_robin_misses() -> None:
    requests = read_trace(EXCERPT, speed=2.0)
    ours, blind = (replayed(scene(4, 4, policy), requests) for policy in ("kv", "round_robin"))
    assert ours.prefix_reuse > blind.prefix_reuse + 0.1
    assert ours.ttft().mean < 0.75 * blind.ttft().mean
    assert ours.ttft().p99 < 0.75 * blind.ttft().p99


def test_knowledge_a_millisecond_late_costs_little_and_half_a_minute_late_more() -> None:
    requests = read_trace(EXCERPT, speed=2.0)
    means = {}
    for bus_s in (0.0, 0.001, 30.0):
        late = msgspec.structs.replace(scene(4, 4, "kv"), delays=Delays(bus_s=bus_s))
        means[bus_s] = replayed(late, requests).ttft().mean
    assert means[0.001] < 1.1 * means[0.0]
    assert means[30.0] > 1.05 * means[0.001]


requests_strategy = st.lists(
    st.builds(
        lambda at, tokens, more, base: (at, tokens, more, base),
        st.sampled_from([0.0, 0.0, 0.01, 0.5]),
        st.integers(1, 3000),
        st.integers(1, 200),
        st.sampled_from([0, 0, 10, 20]),
    ),
    min_size=1,
    max_size=12,
)


@given(requests_strategy, st.sampled_from(["kv", "round_robin", "least_loaded"]), st.integers(52, 90))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_in_pools_that_are_too_small(
    asked: list[tuple[float, int, int, int]], policy: ReplayPolicy, num_blocks: int
) -> None:
    now, requests = 0.0, []
    for gap_s, tokens, max_tokens, base in asked:
        now += gap_s
        pieces = tuple(range(base, base + -(-tokens // 512)))
        requests.append(TraceRequest(arrival_s=now, num_prompt_tokens=tokens, max_tokens=max_tokens, pieces=pieces))
    simulation = Simulation(scene(2, 2, policy, num_blocks=num_blocks))
    outcome = simulation.run(requests)
    assert outcome.num_done == len(requests)
    assert len(outcome.ttft_ms()) == len(requests)
    assert int(outcome.gap_weights().sum()) == sum(one.max_tokens - 1 for one in requests)
    simulation.check_empty()


def test_the_routers_index_ends_up_as_the_workers_caches() -> None:
    simulation = Simulation(scene(3, 2, "kv", num_blocks=2500))
    simulation.run(read_trace(EXCERPT, speed=4.0))
    assert simulation.index_drift() == 0


def test_an_azure_trace_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    requests = read_trace(path, speed=2.0)
    assert [one.num_prompt_tokens for one in requests] == [4808, 3180, 110]
    assert [one.arrival_s for one in requests] == pytest.approx([0.0, 0.026, 1.0], abs=1e-6)
    assert len({piece for one in requests for piece in one.pieces}) == sum(len(one.pieces) for one in requests)


def test_a_vidur_trace_gets_arrivals_at_the_rate_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "3772,54,3826,69.8\n" * 1000)
    requests = read_trace(path, rate=10.0, seed=1)
    assert {(one.num_prompt_tokens, one.max_tokens) for one in requests} == {(3772, 54)}
    assert requests[-1].arrival_s == pytest.approx(100.0, rel=0.15)
    assert requests == read_trace(path, rate=10.0, seed=1) != read_trace(path, rate=10.0, seed=2)
    assert read_trace(path)[-1].arrival_s == pytest.approx(1000.0, rel=0.15)
    assert len({piece for one in requests for piece in one.pieces}) == 8 * len(requests)


def test_a_trace_with_times_refuses_a_rate() -> None:
    with pytest.raises(TraceError, match="times of its own"):
        read_trace(EXCERPT, rate=10.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ("{", "line 1"),
        ('{"timestamp": 0}\n', "line 1: .*input_length"),
        ('{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}', "line 1: 1 hash ids for 600 tokens"),
        ("time,tokens\n1,2\n", "no known format.*TIMESTAMP"),
        ("once upon a time", "no known format"),
        (AZURE + "2023-11-16 18:17:05.9799600,many,27\n", "line 5"),
        (AZURE + "2023-11-16 18:17:05.9799600\n", "line 5"),
        ("num_prefill_tokens,num_decode_tokens\n", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_the_command_says_why_a_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,tokens\n1,2\n")
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code != 0
    assert "no known format" in str(result.exception)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=30))
@settings(deadline=None)
def test_weighted_percentiles_are_those_of_the_values_written_out(pairs: list[tuple[float, int]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    written = np.repeat(values, weights)
    ours, plain = spread(values.astype(float), weights), spread(written.astype(float))
    assert ours.mean == pytest.approx(plain.mean)
    assert (ours.p50, ours.p99) == (plain.p50, plain.p99)


def test_load_over_time_is_weighted_by_time() -> None:
    load = LoadOverTime()
    for now, value in ((0.0, 10.0), (1.0, 0.0), (3.0, 4.0)):
        load.note(now, value)
    assert load.means(4.0, 4).tolist() == [10.0, 0.0, 0.0, 4.0]
    assert load.means(4.0, 2).tolist() == [5.0, 2.0]


def test_the_command_prints_json_for_programs_and_a_table_for_people() -> None:
    arguments = ["replay", str(EXCERPT), "--prefill", "2", "--decode", "2", "--speed", "2", "--requests", "20"]
    result = CliRunner().invoke(app, [*arguments, "--policy", "round_robin", "--json"])
    shown = json.loads(result.stdout)
    assert {"mean", "p50", "p99"} <= shown["ttft_ms"].keys() & shown["itl_ms"].keys()
    assert 0 <= shown["prefix_reuse"] <= 1
    assert shown["requests"] == 20
    plain = CliRunner().invoke(app, [*arguments, "--policy", "round_robin", "--policy", "kv"]).stdout
    assert "round_robin" in plain
    assert "prefill-1" in plain
    assert "decode load over time" in plain


def test_replays_are_reproducible() -> None:
    random.seed(0)
    first, second = (as_json(replayed(scene(2, 2, "kv"), read_trace(EXCERPT, speed=4.0))) for _ in range(2))
    assert first == second
