"""What a router counts of its decisions: numbers of a known workload."""

from schemas.explanation import Bid, Choice, LocalPrefill
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.router_report import ERROR_BUCKETS_S, RoutingTotals
from services.router.tally import MAX_EXPECTED, RoutingTally

A, B = WorkerId("a"), WorkerId("b")


def choice(worker: WorkerId, *, best: int = 0, local: LocalPrefill | None = None, **cached: int) -> Choice:
    bids = [
        Bid(worker=one, score=1.0, cached_tokens=cached.get(str(one), 0), uncached_tokens=100 - cached.get(str(one), 0))
        for one in (A, B)
    ]
    return Choice(
        leg="prefill",
        worker=worker,
        why="best estimate",
        num_candidates=2,
        bids=tuple(bids),
        best_overlap_tokens=best,
        local=local,
    )


def totals(tally: RoutingTally, model: str = "m") -> RoutingTotals:
    return next(one for one in tally.report("r", Epoch(1)).totals if one.model == model)


def test_hits_savings_and_regret_are_those_of_the_prompts_taken() -> None:
    tally = RoutingTally()
    tally.taken("m", choice(A))
    tally.taken("m", choice(A, best=64, a=64))
    tally.taken("m", choice(B, best=64, a=64, b=16))
    tally.taken("m", None)
    found = totals(tally)
    assert (found.num_prompts, found.num_prompt_tokens) == (4, 300)
    assert (found.num_cached_tokens, found.num_missed_tokens) == (80, 48)


def test_bypasses_and_refusals_are_counted_by_reason_and_model() -> None:
    tally = RoutingTally()
    taken = LocalPrefill(is_taken=True, reason="short prompt", worker=A)
    tally.taken("m", choice(A, local=taken))
    tally.taken("m", choice(A, local=taken))
    tally.taken("m", choice(A, local=LocalPrefill(is_taken=False, reason="too long")))
    tally.refused("m", "max_ttft")
    tally.refused("other", "busy")
    assert totals(tally).bypasses == {"short prompt": 2}
    assert totals(tally).refusals == {"max_ttft": 1}
    assert totals(tally, "other").refusals == {"busy": 1}


def test_an_estimates_error_is_what_the_result_took_more_or_less() -> None:
    tally = RoutingTally()
    for name, seconds, took in (("x", 0.5, 0.25), ("y", 0.125, 0.25)):
        tally.expect(AttemptId(name), "m", seconds, 10.0)
        tally.prefilled(AttemptId(name), 10.0 + took)
        tally.prefilled(AttemptId(name), 99.0)  # told twice
    tally.expect(AttemptId("aborted"), "m", 1.0, 10.0)
    tally.forget(AttemptId("aborted"))
    tally.prefilled(AttemptId("aborted"), 20.0)
    found = totals(tally)
    assert (found.num_estimates, found.estimated_s, found.actual_s, found.error_sum_s) == (2, 0.625, 0.5, 0.375)
    assert len(found.error_counts) == len(ERROR_BUCKETS_S) + 1
    assert {bound: n for bound, n in zip(ERROR_BUCKETS_S, found.error_counts, strict=False) if n} == {0.25: 2}


def test_results_that_never_come_are_forgotten() -> None:
    tally = RoutingTally()
    for number in range(MAX_EXPECTED + 1):
        tally.expect(AttemptId(str(number)), "m", 1.0, 0.0)
    tally.prefilled(AttemptId("0"), 1.0)
    assert tally.report("r", Epoch(1)).totals == ()
