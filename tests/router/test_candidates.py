"""Who may serve: live, ready, compatible, not full; and the policies over them."""

from collections import Counter

import msgspec
import pytest

from schemas.errors import CapacityError, ContextOverflowError, UnavailableError
from schemas.ids import Epoch, WorkerId
from schemas.worker import RuntimeConfig
from services.lengths import Lengths
from services.router.candidates import Candidate, decode_partners, find_path, incompatibilities, short_contexts
from services.router.loads import LoadBook, WorkerLoad
from services.router.policies import Picker
from tests.router.conftest import MakeConfig

IDLE = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=False)
SHORT = Lengths(num_prompt_tokens=3, max_tokens=8)


def idle(config: RuntimeConfig) -> WorkerLoad:
    return IDLE


def full(*workers: str) -> "dict[str, WorkerLoad]":
    return {worker: WorkerLoad(requests=17, queued_tokens=0, kv_used=1.0, is_suspect=False) for worker in workers}


def first(configs: list[RuntimeConfig], *, is_strict: bool = False) -> tuple[str | None, list[str]]:
    path = find_path(configs, idle, SHORT, is_strict=is_strict)
    return path.handoff, [str(one.config.worker_id) for one in path.first]


def test_a_pair_is_served_disaggregated(make_config: MakeConfig) -> None:
    pair = [make_config("p", "prefill", handoff="rendezvous"), make_config("d", "decode", handoff="rendezvous")]
    assert first(pair) == ("rendezvous", ["p"])


def test_without_a_prefill_worker_decode_and_both_serve_aggregated(make_config: MakeConfig) -> None:
    assert first([make_config("d", "decode"), make_config("b", "both")]) == (None, ["b", "d"])


def test_a_draining_prefill_worker_is_no_prefill_worker(make_config: MakeConfig) -> None:
    assert first([make_config("p", "prefill", state="draining"), make_config("d", "decode")]) == (None, ["d"])


@pytest.mark.parametrize("by", ["router", "worker"])
def test_strict_without_a_prefill_worker_is_unavailable(make_config: MakeConfig, by: str) -> None:
    with pytest.raises(UnavailableError, match="only decode"):
        first([make_config("d", "decode", is_strict=by == "worker")], is_strict=by == "router")


def test_strict_still_serves_by_workers_of_both_roles(make_config: MakeConfig) -> None:
    assert first([make_config("d", "decode"), make_config("b", "both")], is_strict=True) == (None, ["b"])


def test_a_prefill_worker_alone_is_unavailable(make_config: MakeConfig) -> None:
    with pytest.raises(UnavailableError, match="only prefill"):
        first([make_config("p", "prefill")])


def test_workers_of_other_weights_are_never_paired(make_config: MakeConfig) -> None:
    configs = [make_config("p", "prefill"), make_config("d", "decode", compat="c2", model_digest="d2")]
    assert first(configs) == (None, ["d"])
    with pytest.raises(UnavailableError):
        decode_partners(configs, idle, "c1", SHORT)
    reasons = incompatibilities(configs)
    assert len(reasons) == 2
    assert all("differs in model digest" in reason for reason in reasons)


def test_a_compatible_fleet_has_no_reasons(make_config: MakeConfig) -> None:
    assert incompatibilities([make_config("p", "prefill"), make_config("d", "decode"), make_config("b", "both")]) == []


def test_who_moves_kv_otherwise_is_told_so(make_config: MakeConfig) -> None:
    pair = (("p", "prefill", "c1", "shm"), ("d", "decode", "c2", "nixl"))
    configs = [
        msgspec.structs.replace(make_config(name, role, compat=compat), kv_transport=transport)  # type: ignore[arg-type]
        for name, role, compat, transport in pair
    ]
    assert {reason.rpartition(": ")[2] for reason in incompatibilities(configs)} == {"differs in KV transfer"}


def sized(config: RuntimeConfig, num_tokens: int) -> RuntimeConfig:
    return msgspec.structs.replace(config, max_context_tokens=num_tokens)


def test_a_worker_that_holds_less_than_others_is_named(make_config: MakeConfig) -> None:
    alike = [make_config("p", "prefill"), make_config("d", "decode")]
    assert short_contexts(alike) == []
    small_pool = msgspec.structs.replace(make_config("small", "decode"), total_kv_blocks=2)
    (reason,) = short_contexts([*alike, small_pool])
    assert "1600 tokens" in reason
    assert reason.endswith("pass by small (32)")
    assert short_contexts([*alike, msgspec.structs.replace(small_pool, state="draining")]) == []


def test_a_path_as_long_as_its_only_decode_worker_passes_nobody_by(make_config: MakeConfig) -> None:
    roomy, small = make_config("p", "prefill"), sized(make_config("d", "decode"), 64)
    assert short_contexts([roomy, small]) == []


def test_a_request_goes_to_workers_that_hold_it(make_config: MakeConfig) -> None:
    configs = [
        sized(make_config("small-p", "prefill"), 20),
        make_config("p", "prefill"),
        sized(make_config("small-d", "decode"), 20),
        make_config("d", "decode"),
    ]

    def firsts(lengths: Lengths) -> list[str]:
        return [one.config.worker_id for one in find_path(configs, idle, lengths, is_strict=False).first]

    def partners(lengths: Lengths) -> list[str]:
        return [one.config.worker_id for one in decode_partners(configs, idle, "c1", lengths)]

    fits = Lengths(num_prompt_tokens=12, max_tokens=8)
    assert (firsts(fits), partners(fits)) == (["small-p", "p"], ["small-d", "d"])
    long = Lengths(num_prompt_tokens=12, max_tokens=9)
    assert (firsts(long), partners(long)) == (["p"], ["d"])


def test_prefill_workers_are_left_out_whose_decode_partners_are_too_small(make_config: MakeConfig) -> None:
    configs = [
        make_config("p1", "prefill"),
        sized(make_config("d1", "decode"), 20),
        make_config("p2", "prefill", compat="c2"),
        make_config("d2", "decode", compat="c2"),
    ]
    path = find_path(configs, idle, Lengths(num_prompt_tokens=30, max_tokens=8), is_strict=False)
    assert [one.config.worker_id for one in path.first] == ["p2"]
    with pytest.raises(UnavailableError, match="exceed the 20 tokens"):
        decode_partners(configs, idle, "c1", Lengths(num_prompt_tokens=30, max_tokens=8))


def test_a_prompt_too_long_for_the_pair_goes_to_whoever_serves_alone_but_not_to_decode(
    make_config: MakeConfig,
) -> None:
    pair = [sized(make_config("p", "prefill"), 20), make_config("d", "decode")]
    long = Lengths(num_prompt_tokens=30, max_tokens=8)
    with pytest.raises(ContextOverflowError, match="exceed the 20 tokens"):
        find_path(pair, idle, long, is_strict=False)
    path = find_path([*pair, make_config("b", "both")], idle, long, is_strict=False)
    assert (path.handoff, [one.config.worker_id for one in path.first]) == (None, ["b"])


def test_what_no_path_holds_is_400_with_the_numbers(make_config: MakeConfig) -> None:
    pair = [sized(make_config("p", "prefill"), 40), sized(make_config("d", "decode"), 30)]
    for lengths, param in (
        (Lengths(num_prompt_tokens=30, max_tokens=1), "messages"),
        (Lengths(num_prompt_tokens=29, max_tokens=2), "max_tokens"),
    ):
        with pytest.raises(ContextOverflowError, match="exceed the 30 tokens") as caught:
            find_path(pair, idle, lengths, is_strict=False)
        assert (caught.value.http_status, caught.value.param) == (400, param)


def test_what_a_silent_or_lost_worker_could_hold_is_waited_for(make_config: MakeConfig) -> None:
    silent = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=True)
    big, small = make_config("big", "both"), sized(make_config("small", "both"), 20)
    long = Lengths(num_prompt_tokens=30, max_tokens=8)
    with pytest.raises(UnavailableError):
        find_path([big, small], lambda config: silent if config is big else IDLE, long, is_strict=False)
    with pytest.raises(UnavailableError, match="exceed the 20 tokens"):
        find_path([small], idle, long, is_strict=False, is_again=True)


def test_a_full_pair_is_429_and_never_falls_back_on_decode(make_config: MakeConfig) -> None:
    configs = [make_config("p", "prefill", max_waiting=9), make_config("d", "decode", max_waiting=9)]
    for busy in ("p", "d"):
        loads = full(busy)
        with pytest.raises(CapacityError) as caught:
            find_path(configs, lambda config: loads.get(config.worker_id, IDLE), SHORT, is_strict=False)  # noqa: B023
        assert (caught.value.http_status, caught.value.retry_after_s) == (429, 1.0)


def test_a_full_decode_worker_is_waited_for_one_that_is_gone_is_not(make_config: MakeConfig) -> None:
    configs = [make_config("p", "prefill"), make_config("d", "decode", max_waiting=9)]
    assert decode_partners(configs, lambda config: full("d").get(config.worker_id, IDLE), "c1", SHORT) == []
    gone = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=True)
    with pytest.raises(UnavailableError) as caught:
        decode_partners(configs, lambda config: gone, "c1", SHORT)
    assert (caught.value.http_status, caught.value.retry_after_s) == (503, 1.0)


def test_a_full_pair_leaves_the_request_to_workers_of_both_roles(make_config: MakeConfig) -> None:
    configs = [make_config("p", "prefill", max_waiting=9), make_config("d", "decode"), make_config("b", "both")]
    path = find_path(configs, lambda config: full("p").get(config.worker_id, IDLE), SHORT, is_strict=False)
    assert (path.handoff, [one.config.worker_id for one in path.first]) == (None, ["b"])


def test_a_silent_prefill_worker_is_no_prefill_worker(make_config: MakeConfig) -> None:
    silent = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=True)
    configs = [make_config("p", "prefill"), make_config("d", "decode")]
    path = find_path(configs, lambda config: silent if config.worker_id == "p" else IDLE, SHORT, is_strict=False)
    assert (path.handoff, [one.config.worker_id for one in path.first]) == (None, ["d"])


def test_a_pair_in_another_group_takes_over_from_a_full_one(make_config: MakeConfig) -> None:
    configs = [
        make_config(f"{role[0]}{compat}", role, compat=compat, max_waiting=9)
        for compat in ("c1", "c2")
        for role in ("prefill", "decode")
    ]  # type: ignore[arg-type]
    path = find_path(configs, lambda config: full("dc1").get(config.worker_id, IDLE), SHORT, is_strict=False)
    assert [one.config.worker_id for one in path.first] == ["pc2"]


def candidates(make_config: MakeConfig, book: LoadBook, names: list[str]) -> list[Candidate]:
    return [Candidate(config=make_config(name, "prefill"), load=book.load(WorkerId(name), 0.0)) for name in names]


@pytest.mark.parametrize("policy", ["round_robin", "queue", "least_loaded"])
def test_eight_prompts_at_once_give_four_idle_workers_two_each(make_config: MakeConfig, policy: str) -> None:
    book, picker = LoadBook(Epoch(1)), Picker(policy)  # type: ignore[arg-type]
    picked: Counter[str] = Counter()
    for _ in range(8):
        chosen = picker.pick("prefill", candidates(make_config, book, ["a", "b", "c", "d"]))
        book.add(chosen.config.worker_id, book.next_number(), 1000, now=0.0)
        picked[chosen.config.worker_id] += 1
    assert picked == dict.fromkeys("abcd", 2)


def test_least_loaded_prefers_the_shortest_prefill_queue(make_config: MakeConfig) -> None:
    book, picker = LoadBook(Epoch(1)), Picker("least_loaded")
    book.add(WorkerId("a"), book.next_number(), 4000, now=0.0)
    for _ in range(3):
        chosen = picker.pick("prefill", candidates(make_config, book, ["a", "b"]))
        book.add(chosen.config.worker_id, book.next_number(), 100, now=0.0)
        assert chosen.config.worker_id == "b"


def test_a_worker_that_joins_gets_the_next_turn(make_config: MakeConfig) -> None:
    book, picker = LoadBook(Epoch(1)), Picker("round_robin")
    for _ in range(4):
        picker.pick("prefill", candidates(make_config, book, ["a", "b"]))
    assert picker.pick("prefill", candidates(make_config, book, ["a", "b", "new"])).config.worker_id == "new"
