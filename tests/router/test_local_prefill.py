"""Conditional disaggregation: when a prompt stays on the decode worker, and never where it would not gain by it."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.explanation import LocalPrefill
from schemas.ids import WorkerId
from schemas.worker import PrefillCost
from services.router.estimates import Standing, least_prefill_s, marginal_s, prefill_s
from services.router.kv_policy import Decision, KvPolicy, KvSettings, Prompt
from services.router.local_prefill import LocalSettings, Remote, weigh

COST = PrefillCost(num_passes=99, base_s=0.01, token_s=1e-4)
TRANSFER = PrefillCost(num_passes=9, base_s=0.002, token_s=1e-6)
P, D, E = WorkerId("p"), WorkerId("d"), WorkerId("e")
ON = LocalSettings(is_on=True, max_tokens=1000, max_stolen_tokens=100)


def standing(worker: WorkerId = D, **changes: object) -> Standing:
    values: dict[str, object] = {"cost": COST, "max_batched_tokens": 512, "is_measured": True}
    return Standing(worker=worker, **(values | changes))  # type: ignore[arg-type]


def choose(
    num_tokens: int,
    prefill: Standing,
    *decoders: Standing,
    overlaps: dict[WorkerId, int] | None = None,
    settings: LocalSettings = ON,
    transfer: PrefillCost | None = TRANSFER,
) -> tuple[Decision, LocalPrefill]:
    policy = KvPolicy(KvSettings(local=settings), random.Random(1))
    prompt = Prompt(num_tokens=num_tokens, block_size=16, overlaps=overlaps or {})
    decision = policy.stay_or_go(prompt, policy.choose_prefill(prompt, [prefill]), decoders, transfer)
    assert decision.choice.local is not None
    return decision, decision.choice.local


def test_a_short_prompt_stays_on_an_idle_decode_worker_and_says_why() -> None:
    decision, local = choose(100, standing(P), standing())
    assert (decision.worker, decision.is_local, local.reason) == (D, True, "short prompt")
    assert local.local_s == prefill_s(COST, 100, 512)
    assert local.remote_s == pytest.approx(local.local_s + 0.002 + 100e-6 + ON.handoff_s)
    assert (decision.bid.uncached_tokens, local.uncached_tokens, local.num_streams) == (100, 100, 0)


def test_a_long_prompt_goes_to_prefill_however_idle_decode_is() -> None:
    decision, local = choose(2000, standing(P), standing())
    assert (decision.worker, decision.is_local, local.reason) == (P, False, "too long")


def test_a_long_prompt_that_decode_has_mostly_cached_stays() -> None:
    decision, local = choose(2000, standing(P), standing(), overlaps={D: 120})
    assert (decision.worker, local.reason, local.cached_tokens) == (D, "mostly cached", 1920)
    assert decision.choice.best_overlap_tokens == 1920


def test_a_queue_at_prefill_is_a_reason_to_stay() -> None:
    _, local = choose(600, standing(P, queued_tokens=5000), standing())
    assert (local.is_taken, local.reason) == (True, "prefill is busy")


def test_running_streams_are_stolen_no_more_than_the_set_number_of_tokens() -> None:
    busy = standing(P, queued_tokens=50_000)
    for num_tokens, is_taken in ((100, True), (101, False)):
        _, local = choose(num_tokens, busy, standing(requests=1))
        assert local.is_taken == is_taken
    assert local.reason == "streams are running"


def test_what_all_streams_lose_counts_against_what_the_newcomer_gains() -> None:
    lose_s = marginal_s(COST, 80, 512)
    gain_s = 0.002 + 80e-6 + ON.handoff_s
    num_streams = int(gain_s / lose_s) + 1
    _, local = choose(80, standing(P), standing(requests=num_streams))
    assert (local.is_taken, local.reason) == (False, "prefill is faster")
    assert local.streams_lose_s == num_streams * lose_s > gain_s
    _, local = choose(
        80, standing(P), standing(requests=num_streams), settings=msgspec.structs.replace(ON, stream_weight=0.0)
    )
    assert local.is_taken


def test_nothing_stays_where_nobody_has_measured_anything_or_there_is_no_room() -> None:
    assert choose(10, standing(P), standing(is_measured=False))[1].reason == "no estimate"
    full = standing(capacity_tokens=1000, held_tokens=995)
    assert choose(10, standing(P), full)[1].reason == "no room"


def test_of_several_decode_workers_the_one_with_the_least_cost_computes() -> None:
    decision, _ = choose(100, standing(P), standing(D, requests=2), standing(E))
    assert decision.worker == E
    decision, _ = choose(600, standing(P), standing(D), standing(E), overlaps={D: 30})
    assert decision.worker == D


def test_equal_decode_workers_take_turns_by_chance() -> None:
    policy = KvPolicy(KvSettings(local=ON), random.Random(5))
    prompt = Prompt(num_tokens=50, block_size=16, overlaps={})
    remote = policy.choose_prefill(prompt, [standing(P)])
    chosen = {policy.stay_or_go(prompt, remote, [standing(D), standing(E)], TRANSFER).worker for _ in range(40)}
    assert chosen == {D, E}


def test_a_rendezvous_hides_the_transfer() -> None:
    _, local = choose(100, standing(P), standing(), transfer=None)
    assert local.remote_s == pytest.approx(local.local_s + ON.handoff_s)


standings = st.builds(
    standing,
    queued_tokens=st.integers(0, 3000),
    pass_rest_s=st.floats(0, 1),
    requests=st.integers(0, 20),
    held_tokens=st.integers(0, 3000),
    capacity_tokens=st.sampled_from([0, 4000]),
    is_measured=st.booleans(),
)
remotes = st.builds(Remote, prefill_s=st.floats(0, 3), transfer=st.sampled_from([None, TRANSFER]))


@given(num_tokens=st.integers(1, 3000), share=st.floats(0, 1), where=standings, remote=remotes)
def test_a_prompt_that_stays_gains_more_than_the_streams_there_lose(
    num_tokens: int, share: float, where: Standing, remote: Remote
) -> None:
    cached = int(share * (num_tokens - 1))
    weighed = weigh(num_tokens, cached, where, remote, ON)
    if weighed.obstacle is None:
        assert where.is_measured
        assert weighed.local_s + weighed.streams_lose_s < weighed.remote_s
        assert num_tokens - cached <= (ON.max_stolen_tokens if where.requests else ON.max_tokens)
        assert not where.capacity_tokens or where.held_tokens + num_tokens <= where.capacity_tokens


@given(num_tokens=st.integers(1, 3000), where=standings, remote=remotes, more=st.integers(1, 5))
def test_more_streams_never_make_a_prompt_stay_and_a_longer_queue_at_prefill_never_makes_it_go(
    num_tokens: int, where: Standing, remote: Remote, more: int
) -> None:
    def stays(where: Standing, remote: Remote) -> bool:
        return weigh(num_tokens, 0, where, remote, ON).obstacle is None

    busier = msgspec.structs.replace(where, requests=where.requests + more)
    slower = msgspec.structs.replace(remote, prefill_s=remote.prefill_s + more)
    assert stays(where, remote) or not stays(busier, remote)
    assert stays(where, slower) or not stays(where, remote)


@given(num_tokens=st.integers(1, 5000), max_tokens=st.integers(0, 900), max_batched=st.integers(1, 600))
def test_a_lower_bound_is_one_and_the_estimate_itself_where_passes_were_seen(
    num_tokens: int, max_tokens: int, max_batched: int
) -> None:
    cost = msgspec.structs.replace(COST, max_tokens=max_tokens)
    least, estimate = least_prefill_s(cost, num_tokens, max_batched), prefill_s(cost, num_tokens, max_batched)
    assert 0 < least <= estimate
    if not max_tokens or min(num_tokens, max_batched) <= 8 * max_tokens:
        assert least == estimate


def test_small_passes_alone_say_little_of_a_long_prompt() -> None:
    small = PrefillCost(num_passes=99, max_tokens=5, token_s=0.0166)
    assert prefill_s(small, 10_000, 8192) > 100
    assert least_prefill_s(small, 10_000, 8192) < 2


@given(num_tokens=st.integers(1, 5000), max_batched=st.integers(1, 600))
def test_what_a_stream_loses_is_the_prompts_share_of_the_steps(num_tokens: int, max_batched: int) -> None:
    lost = marginal_s(COST, num_tokens, max_batched)
    assert abs(lost - 1e-4 * num_tokens) < 1e-9
