"""The kv policy's choices and the estimates behind them."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import WorkerId
from schemas.worker import PrefillCost
from services.pass_times import PassTimes
from services.router.cache_age import CacheAge
from services.router.estimates import Link, Standing, cached_tokens, nearness, pass_s, prefill_s, transfer_s
from services.router.kv_policy import Decision, KvPolicy, KvSettings, Prompt, draw, near_enough

COST = PrefillCost(base_s=0.01, token_s=1e-5, token2_s=1e-10)
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def policy(**changes: object) -> KvPolicy:
    return KvPolicy(KvSettings(**changes), random.Random(3))  # type: ignore[arg-type]


def standing(worker: WorkerId, **changes: object) -> Standing:
    return Standing(worker=worker, cost=COST, max_batched_tokens=8192, **changes)  # type: ignore[arg-type]


def prompt(num_tokens: int = 6400, session_worker: WorkerId | None = None, **overlaps: int) -> Prompt:
    return Prompt(
        num_tokens=num_tokens,
        block_size=64,
        overlaps={WorkerId(name): blocks for name, blocks in overlaps.items()},
        session_worker=session_worker,
    )


def choose(*standings: Standing, asked: Prompt, **settings: object) -> Decision:
    return policy(**settings).choose_prefill(asked, standings)


def test_of_idle_workers_the_one_with_the_prefix_gets_the_prompt() -> None:
    decision = choose(standing(A), standing(B), asked=prompt(b=50))
    assert (decision.worker, decision.choice.why, decision.bid.cached_tokens) == (B, "best estimate", 3200)
    assert decision.bid.uncached_tokens == 3200
    assert decision.choice.best_overlap_tokens == 3200


def test_a_long_queue_outweighs_a_prefix() -> None:
    decision = choose(standing(A), standing(B, queued_tokens=20_000), asked=prompt(b=50))
    assert decision.worker == A
    assert decision.choice.best_overlap_tokens == 3200


def test_the_rest_of_a_pass_counts_as_waiting() -> None:
    assert choose(standing(A, pass_rest_s=0.5), standing(B), asked=prompt(a=20)).worker == B


def test_among_equals_the_oldest_cache_gets_the_prompt() -> None:
    old, young = standing(A, oldest_at=5.0), standing(B, oldest_at=9.0)
    for standings in ((old, young), (young, old)):
        decision = choose(*standings, asked=prompt())
        assert (decision.worker, decision.choice.why) == (A, "oldest cache of equals")


def test_a_worker_that_computes_slower_is_estimated_by_its_own_rate() -> None:
    slow = Standing(worker=A, cost=PrefillCost(base_s=0.01, token_s=1e-4), max_batched_tokens=8192)
    assert choose(slow, standing(B, queued_tokens=2000), asked=prompt()).worker == B


def test_the_session_stays_on_its_worker_unless_that_costs_too_much() -> None:
    near = choose(
        standing(A, queued_tokens=500), standing(B), asked=prompt(session_worker=A), session_slack_s=0.05, tie_s=0.0
    )
    assert (near.worker, near.choice.why) == (A, "session")
    assert choose(standing(A, queued_tokens=50_000), standing(B), asked=prompt(session_worker=A)).worker == B


def test_temperature_spreads_the_choices_around_the_best() -> None:
    warm = policy(temperature_s=0.05)
    standings = (standing(A), standing(B, queued_tokens=3000), standing(C, queued_tokens=500_000))
    counts = dict.fromkeys((A, B, C), 0)
    for _ in range(300):
        counts[warm.choose_prefill(prompt(), standings).worker] += 1
    assert counts[A] > counts[B] > 20
    assert counts[C] == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(1e-6, 1e3))
@settings(deadline=None)
def test_a_draw_never_fails_however_far_scores_lie_apart(scores: list[float], temperature: float) -> None:
    assert 0 <= draw(scores, temperature, random.Random(1)) < len(scores)


def test_a_draw_passes_over_what_cannot_take_it() -> None:
    assert all(draw([math.inf, 1.0], 10.0, random.Random(seed)) == 1 for seed in range(50))


def test_decode_goes_where_fewest_tokens_are_held_and_never_to_a_full_pool() -> None:
    free = standing(A, held_tokens=900, capacity_tokens=1000)
    busy = standing(B, held_tokens=5000, capacity_tokens=100_000)
    assert policy().choose_decode(50, (free, busy), {}).worker == A
    assert policy().choose_decode(500, (free, busy), {}).worker == B


def test_a_long_prompt_avoids_the_crowd_and_a_short_one_the_tokens() -> None:
    crowded, heavy = standing(A, held_tokens=20_000, requests=40), standing(B, held_tokens=30_000, requests=2)
    assert policy(crowding=1.0).choose_decode(20_000, (crowded, heavy), {}).worker == B
    assert policy(crowding=1.0).choose_decode(100, (crowded, heavy), {}).worker == A


def test_decode_stays_near_the_prefill_worker_until_that_is_too_full() -> None:
    here = {"zone": "z", "rack": "r1", "host": "h1"}
    same_host = standing(A, held_tokens=1000, labels=here)
    same_zone = standing(B, held_tokens=900, labels={"zone": "z", "rack": "r2", "host": "h2"})
    other_zone = standing(C, held_tokens=100, labels={"zone": "y"})
    levels = ("zone", "rack", "host")
    assert near_enough((same_host, same_zone, other_zone), here, levels, spill=20.0) == [same_host]
    assert near_enough((same_host, same_zone, other_zone), here, levels, spill=9.5) == [same_host, same_zone]
    assert len(near_enough((same_host, same_zone, other_zone), here, levels, spill=1.25)) == 3
    assert near_enough((same_host,), {}, levels, spill=1.0) == [same_host]


def test_a_decision_names_its_candidates_and_its_choice() -> None:
    standings = [standing(WorkerId(f"w{n}"), queued_tokens=1000 * n, oldest_at=float(-n)) for n in range(20)]
    decision = policy(tie_s=10.0, num_explained=3).choose_prefill(prompt(), standings)
    assert decision.choice.num_candidates == 20
    assert [bid.worker for bid in decision.choice.bids] == ["w19", "w0", "w1", "w2"]
    assert decision.bid.worker == "w19"
    assert policy().choose_prefill(prompt(), standings[:1]).choice.why == "only candidate"


@given(st.integers(1, 5000), st.integers(0, 100), st.sampled_from([1, 16, 64]))
@settings(deadline=None)
def test_a_hit_saves_whole_blocks_and_never_the_last_token(num_tokens: int, num_blocks: int, block_size: int) -> None:
    saved = cached_tokens(num_blocks, block_size, num_tokens)
    assert saved % block_size == 0
    assert 0 <= saved < num_tokens
    assert saved <= num_blocks * block_size


def test_prefill_time_counts_passes_of_the_budget() -> None:
    assert prefill_s(COST, 0, 8192) == 0.0
    assert prefill_s(COST, 100, 8192) == pass_s(COST, 100)
    assert prefill_s(COST, 20_000, 8192) == pytest.approx(2 * pass_s(COST, 8192) + pass_s(COST, 3616))


def test_transfer_takes_its_latency_and_its_bytes() -> None:
    # 131072 B a token at 64 GB/s: 20,000 tokens take 40.96 ms (facts of Dynamo's replay).
    assert transfer_s(20_000, 131_072, Link(gb_per_s=64.0)) == pytest.approx(0.04096)
    assert transfer_s(20_000, 131_072, Link(latency_s=0.002)) == 0.002


def test_nearness_ends_at_the_first_label_that_differs() -> None:
    levels = ("zone", "rack", "host")
    assert nearness({"zone": "z", "host": "h"}, {"zone": "z", "host": "h"}, levels) == 1
    assert nearness({"zone": "z", "rack": "r"}, {"zone": "y", "rack": "r"}, levels) == 0
    assert nearness({}, {"zone": "y"}, levels) == 0


@given(
    st.floats(0.0, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(0.0, 1e-8),
    st.lists(st.integers(1, 8192), min_size=4, max_size=30, unique=True),
)
@settings(deadline=None)
def test_a_fit_of_exact_passes_finds_their_times(base: float, token: float, token2: float, sizes: list[int]) -> None:
    truth, times = PrefillCost(base_s=base, token_s=token, token2_s=token2), PassTimes()
    assert times.cost() is None
    for size in sizes:
        times.note(size, pass_s(truth, size))
    cost = times.cost()
    assert cost is not None
    assert min(cost.base_s, cost.token_s, cost.token2_s) >= 0
    assert pass_s(cost, max(sizes)) == pytest.approx(pass_s(truth, max(sizes)), rel=0.1, abs=1e-3)


def test_a_fit_follows_a_machine_that_gets_slower() -> None:
    times, sizes = PassTimes(), random.Random(1)
    for factor in (1.0, 3.0):
        for _ in range(3000):
            size = sizes.randint(64, 8192)
            times.note(size, factor * pass_s(COST, size))
    cost = times.cost()
    assert cost is not None
    assert pass_s(cost, 4000) == pytest.approx(3 * pass_s(COST, 4000), rel=0.02)


def test_passes_of_one_size_give_a_rate_for_that_size() -> None:
    times = PassTimes()
    for _ in range(5):
        times.note(1000, 0.2)
    cost = times.cost()
    assert cost is not None
    assert pass_s(cost, 1000) == pytest.approx(0.2)


def test_a_cache_is_as_old_as_the_tokens_it_has_taken_since() -> None:
    ages = CacheAge()
    assert ages.oldest_at(A) == ages.oldest_at(B)
    ages.placed(A, 600, 1000, 1.0)
    assert ages.oldest_at(B) < ages.oldest_at(A) < 0
    ages.placed(A, 600, 1000, 2.0)
    assert ages.oldest_at(A) == 2.0
    ages.placed(A, 300, 1000, 3.0)
    assert ages.oldest_at(A) == 2.0
    ages.placed(A, 500, 1000, 4.0)
    assert ages.oldest_at(A) == 3.0
    ages.forget(A)
    assert ages.oldest_at(A) < 0
