"""The scheduler under any order of orders, driven step by step with the sim model and no thread."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import EngineError, RequestError
from schemas.frames import Begun, Failed, Finished, Tokens
from schemas.request import Deadlines, GenerateRequest, StopConditions
from services.engines.paged.desk import BlocksReserved, ChunkComputed, Notice, PromptComputed
from services.engines.paged.limits import Limits
from services.engines.paged.scheduler import Scheduler
from services.engines.sim.pool import SimPool
from services.engines.sim.runner import SimRunner
from tests.engines.scenes import EOS_ID, WORD_IDS, Oracle, a_request, allocate


class Stage:
    """A scheduler over a sim runner, the notices it gave, and its clock."""

    def __init__(self, **engine_args: object) -> None:
        self.runner = SimRunner({name: str(value) for name, value in engine_args.items()})
        self.spec = self.runner.load(allocate)
        self.limits = Limits.of(self.spec)
        self.scheduler = Scheduler(self.limits)
        self.notices: list[Notice] = []
        self.now = 1000.0

    def step(self) -> bool:
        """Run one step; return False when there was nothing to run."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            num_tokens = sum(len(piece.token_ids) for piece in plan.slices)
            assert 0 < num_tokens <= self.limits.max_batched_tokens
            assert len(plan.slices) <= self.limits.max_num_seqs
            self.scheduler.apply(plan, self.runner.execute(plan.slices), self.now)
        self.notices += self.scheduler.take()
        return plan is not None

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("the scheduler goes on for ever")

    def of(self, request: GenerateRequest, kind: type[Any] = object) -> list[Any]:
        return [n for n in self.notices if n.attempt_id == request.attempt_id and isinstance(n, kind)]

    def ids(self, request: GenerateRequest) -> list[int]:
        return [i for tokens in self.of(request, Tokens) for i in tokens.token_ids]

    def fill(self, request: GenerateRequest, oracle: Oracle) -> int:
        """Write the prompt's KV into the blocks reserved for it, as a transfer would; return the first token."""
        (reserved,) = self.of(request, BlocksReserved)
        ids = [*request.token_ids, *request.resume]
        write_rows(self.pool(), reserved, oracle.rows(ids), self.spec.layout.block_size)
        return oracle.next_id(request, ids)

    def pool(self) -> SimPool:
        return self.runner._pool

    def assert_empty(self) -> None:
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.num_held) == (0, 0, 0)
        assert (load.kv_blocks_used, load.kv_blocks_quarantined, load.queued_prefill_tokens) == (0, 0, 0)


def write_rows(pool: SimPool, reserved: BlocksReserved, rows: list[tuple[int, int]], block_size: int) -> None:
    for position in range(reserved.num_cached_blocks * block_size, len(rows)):
        block = reserved.block_ids[position // block_size]
        pool.write(block * block_size + position % block_size, *rows[position])


def prompt(start: int, length: int) -> list[int]:
    return [WORD_IDS[(start + i) % len(WORD_IDS)] for i in range(length)]


def test_a_completion_is_what_the_oracle_says_and_the_counts_return_to_zero() -> None:
    stage, request = Stage(), a_request(prompt(0, 20), 30)
    stage.scheduler.generate(request, stage.now)
    stage.run()
    assert stage.ids(request) == Oracle().completion(request)
    assert [t.seq for t in stage.of(request, Tokens)] == list(range(30))
    (finished,) = stage.of(request, Finished)
    assert (finished.seq, finished.reason) == (30, "length")
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (20, 30)
    assert finished.usage.num_computed_prompt_tokens == 20
    stage.assert_empty()


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("offset", ["1", "b-1", "b", "b+1", "2b"])
def test_every_prompt_length_around_a_block_is_exact_cold_and_cached(block_size: int, offset: str) -> None:
    length = {"1": 1, "b-1": block_size - 1, "b": block_size, "b+1": block_size + 1, "2b": 2 * block_size}[offset]
    if not length:
        return
    stage = Stage(block_size=block_size, num_blocks=1024 // block_size + 16)
    for num_cached in (0, (length - 1) // block_size * block_size):
        request = a_request(prompt(3, length), 5)
        stage.scheduler.generate(request, stage.now)
        stage.run()
        assert stage.ids(request) == Oracle().completion(request)
        assert stage.of(request, Finished)[0].usage.cached_tokens == num_cached


def test_a_prefix_is_never_hit_under_another_salt() -> None:
    stage = Stage()
    for salt, num_cached in (("a", 0), ("a", 48), ("b", 0), ("", 0)):
        request = a_request(prompt(0, 50), 2, cache_salt=salt)
        stage.scheduler.generate(request, stage.now)
        stage.run()
        assert stage.of(request, Finished)[0].usage.cached_tokens == num_cached


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    stage = Stage(max_batched_tokens=32, max_num_seqs=4)
    chatty, long = a_request(prompt(0, 4), 40), a_request(prompt(9, 320), 2)
    stage.scheduler.generate(chatty, stage.now)
    stage.step()
    stage.scheduler.generate(long, stage.now)
    for _ in range(5):
        before = len(stage.ids(chatty))
        stage.step()
        assert len(stage.ids(chatty)) == before + 1
        assert not stage.ids(long)
    stage.run()
    assert stage.ids(long) == Oracle().completion(long)


def test_two_requests_that_need_sixty_percent_of_the_pool_each_both_end() -> None:
    stage = Stage(num_blocks=10, block_size=4)
    requests = [a_request(prompt(i * 50, 8), 17) for i in range(2)]
    for request in requests:
        stage.scheduler.generate(request, stage.now)
    stage.run()
    for request in requests:
        assert stage.ids(request) == Oracle().completion(request)
        assert len(stage.of(request, Finished)) == 1
    assert stage.scheduler.load().num_recomputed_tokens > 0, "the staging was to force a preemption"
    stage.assert_empty()


def test_the_newest_decoding_sequence_is_the_one_preempted() -> None:
    stage = Stage(num_blocks=6, block_size=4)
    old, new = a_request(prompt(0, 8), 12), a_request(prompt(50, 8), 12)
    stage.scheduler.generate(old, stage.now)
    stage.scheduler.generate(new, stage.now)
    stage.run()
    order = [n.attempt_id for n in stage.notices if isinstance(n, Finished)]
    assert order == [old.attempt_id, new.attempt_id]
    assert stage.of(old, Finished)[0].usage.num_computed_prompt_tokens == 8
    assert stage.of(new, Finished)[0].usage.num_computed_prompt_tokens > 8 - 4


def test_a_sequence_that_preempts_itself_lets_those_in_that_waited_for_its_blocks() -> None:
    stage = Stage(num_blocks=8, block_size=4)
    held, newest, urgent = (
        a_request(prompt(0, 16)),
        a_request(prompt(50, 8), 12),
        a_request(prompt(99, 12), 2, priority=1),
    )
    stage.scheduler.hold(held, stage.now, report_chunks=False)
    stage.scheduler.generate(newest, stage.now)
    stage.step()
    stage.step()
    stage.scheduler.generate(urgent, stage.now)
    stage.run()
    assert stage.of(urgent, Finished)
    assert not stage.of(newest, Finished)
    stage.scheduler.release(held.attempt_id)
    stage.run()
    assert stage.ids(newest) == Oracle().completion(newest)
    stage.assert_empty()


def test_a_held_prompt_under_way_is_not_preempted_for_its_blocks_are_being_sent() -> None:
    stage = Stage(num_blocks=8, block_size=4, max_batched_tokens=8)
    decoding, held = a_request(prompt(0, 6), 8), a_request(prompt(50, 24))
    stage.scheduler.generate(decoding, stage.now)
    stage.step()
    stage.scheduler.hold(held, stage.now, report_chunks=True)
    stage.run()
    told = [n.block_ids for n in stage.of(held, (ChunkComputed, PromptComputed))]
    assert len(told) > 2
    assert len(set(told)) == 1
    assert not stage.of(decoding, Finished)
    stage.scheduler.release(held.attempt_id)
    stage.run()
    assert stage.ids(decoding) == Oracle().completion(decoding)


def test_a_prompt_given_up_half_way_leaves_no_prefix_hit_beyond_what_was_computed() -> None:
    stage = Stage(num_blocks=64, block_size=4, max_batched_tokens=8)
    first, second = a_request(prompt(0, 40), 5), a_request(prompt(0, 40), 5)
    stage.scheduler.generate(first, stage.now)
    stage.step()
    stage.scheduler.abort(first.attempt_id)
    stage.scheduler.generate(second, stage.now)
    stage.run()
    assert stage.ids(second) == Oracle().completion(second)
    assert stage.of(second, Finished)[0].usage.cached_tokens == 8


def test_admission_goes_by_priority_and_then_by_arrival() -> None:
    stage = Stage(max_num_seqs=1)
    requests = [a_request(prompt(i, 4), 2, priority=priority) for i, priority in enumerate((0, 0, 5))]
    for request in requests:
        stage.scheduler.generate(request, stage.now)
    stage.run()
    order = [n.attempt_id for n in stage.notices if isinstance(n, Finished)]
    assert order == [requests[2].attempt_id, requests[0].attempt_id, requests[1].attempt_id]


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    stage = Stage(num_blocks=8, block_size=4)
    running, large, small = (a_request(prompt(i, n), 9) for i, n in ((0, 8), (100, 24), (200, 1)))
    for request in (running, large, small):
        stage.scheduler.generate(request, stage.now)
    stage.run()
    order = [n.attempt_id for n in stage.notices if isinstance(n, Tokens) and n.seq == 0]
    assert order == [running.attempt_id, large.attempt_id, small.attempt_id]


def test_a_held_prompt_keeps_its_blocks_without_a_slot_until_it_is_released() -> None:
    stage = Stage(max_num_seqs=1)
    held, other = a_request(prompt(0, 20), 8), a_request(prompt(40, 20), 3)
    stage.scheduler.hold(held, stage.now, report_chunks=False)
    stage.run()
    (computed,) = stage.of(held, PromptComputed)
    assert computed.first_token_id == Oracle().completion(held)[0]
    assert (computed.num_tokens, len(computed.block_ids), computed.finish_reason) == (20, 2, None)
    stage.scheduler.generate(other, stage.now)
    stage.run()
    assert stage.of(other, Finished)
    assert (stage.scheduler.load().num_held, stage.scheduler.load().kv_blocks_used) == (1, 2)
    for _ in range(2):
        stage.scheduler.release(held.attempt_id)
    stage.assert_empty()


@pytest.mark.parametrize(
    ("stop", "resume", "reason"),
    [
        (StopConditions(max_tokens=1), (), "length"),
        (StopConditions(max_tokens=3), tuple(WORD_IDS[:2]), "length"),
        (StopConditions(max_tokens=3), tuple(WORD_IDS[:1]), None),
        (StopConditions(max_tokens=9, stop_token_ids=tuple(WORD_IDS)), (), "stop"),
        (StopConditions(max_tokens=1, stop_token_ids=tuple(WORD_IDS)), (), "stop"),
    ],
)
def test_a_held_prompt_whose_first_token_ends_the_request_frees_its_blocks(
    stop: StopConditions, resume: tuple[int, ...], reason: str | None
) -> None:
    stage, request = Stage(), a_request(prompt(0, 20), stop=stop, resume=resume)
    stage.scheduler.hold(request, stage.now, report_chunks=False)
    stage.run()
    (computed,) = stage.of(request, PromptComputed)
    assert computed.finish_reason == reason
    if reason is None:
        stage.scheduler.release(request.attempt_id)
    else:
        assert computed.block_ids == ()
    stage.assert_empty()


def test_chunks_of_a_held_prompt_are_reported_and_its_blocks_stay_even_when_the_first_token_ends_it() -> None:
    stage = Stage(max_batched_tokens=16, max_num_seqs=4)
    for expected in ([16, 32], [32]):
        request = a_request(prompt(0, 40), 1)
        stage.scheduler.hold(request, stage.now, report_chunks=True)
        stage.run()
        assert [chunk.num_computed_tokens for chunk in stage.of(request, ChunkComputed)] == expected
        (computed,) = stage.of(request, PromptComputed)
        assert len(computed.block_ids) == 3
        assert computed.finish_reason is None
        stage.scheduler.release(request.attempt_id)
    stage.assert_empty()


def test_a_reserved_sequence_decodes_on_the_kv_that_came_and_computes_no_prompt_token() -> None:
    stage, oracle, request = Stage(), Oracle(), a_request(prompt(0, 40), 12)
    stage.scheduler.reserve(request, stage.now)
    stage.run()
    first = stage.fill(request, oracle)
    stage.scheduler.begin(
        request.attempt_id, stage.now, first_token_id=first, first_logprobs=None, num_cached_tokens=32
    )
    stage.run()
    assert stage.ids(request) == oracle.completion(request)
    usage = stage.of(request, Finished)[0].usage
    assert (usage.num_computed_prompt_tokens, usage.cached_tokens) == (0, 32)
    assert stage.scheduler.load().num_recomputed_tokens == 0
    stage.assert_empty()


def test_wrong_prompt_ids_with_the_real_kv_give_the_real_output() -> None:
    stage, oracle = Stage(), Oracle()
    real = a_request(prompt(0, 40), 20)
    wrong = a_request(prompt(77, 40), 20)
    stage.scheduler.reserve(wrong, stage.now)
    stage.run()
    write_rows(stage.pool(), stage.of(wrong, BlocksReserved)[0], oracle.rows(real.token_ids), 16)
    completion = oracle.completion(real)
    stage.scheduler.begin(
        wrong.attempt_id, stage.now, first_token_id=completion[0], first_logprobs=None, num_cached_tokens=0
    )
    stage.run()
    assert stage.ids(wrong) == completion
    assert completion != oracle.completion(wrong)


def test_one_wrong_row_anywhere_in_the_kv_that_came_is_seen_in_the_text() -> None:
    oracle = Oracle()
    for position in range(39):
        stage, request = Stage(), a_request(prompt(0, 40), 4)
        stage.scheduler.reserve(request, stage.now)
        stage.run()
        first = stage.fill(request, oracle)
        block = stage.of(request, BlocksReserved)[0].block_ids[position // 16]
        state, token_id = stage.pool().read(block * 16 + position % 16)
        stage.pool().write(block * 16 + position % 16, state ^ 1, token_id)
        stage.scheduler.begin(
            request.attempt_id, stage.now, first_token_id=first, first_logprobs=None, num_cached_tokens=0
        )
        stage.run()
        assert stage.ids(request) != oracle.completion(request)


def test_a_first_token_that_ends_a_begun_request_is_delivered_and_ends_it() -> None:
    stage, request = Stage(), a_request(prompt(0, 5), stop=StopConditions(max_tokens=9))
    stage.scheduler.reserve(request, stage.now)
    stage.run()
    stage.scheduler.begin(
        request.attempt_id, stage.now, first_token_id=EOS_ID, first_logprobs=None, num_cached_tokens=0
    )
    stage.run()
    assert stage.ids(request) == [EOS_ID]
    assert stage.of(request, Finished)[0].reason == "stop"
    stage.assert_empty()


def test_reservations_beyond_slots_and_blocks_wait_their_turn_and_none_is_lost() -> None:
    stage, oracle = Stage(max_num_seqs=4, num_blocks=16), Oracle()
    requests = [a_request(prompt(7 * i, 20), 6) for i in range(32)]
    for request in requests:
        stage.scheduler.reserve(request, stage.now)
    begun: set[str] = set()
    while len(begun) < len(requests):
        stage.run()
        waiting = [r for r in requests if stage.of(r, BlocksReserved) and r.attempt_id not in begun]
        assert 0 < len(waiting) <= 4
        for request in waiting:
            first = stage.fill(request, oracle)
            stage.scheduler.begin(
                request.attempt_id, stage.now, first_token_id=first, first_logprobs=None, num_cached_tokens=0
            )
            begun.add(request.attempt_id)
    stage.run()
    reserved = [n.attempt_id for n in stage.notices if isinstance(n, BlocksReserved)]
    assert reserved == [request.attempt_id for request in requests]
    assert all(stage.ids(request) == oracle.completion(request) for request in requests)
    stage.assert_empty()


@pytest.mark.parametrize("quarantine", [False, True])
def test_kv_that_does_not_come_is_recomputed_and_counted(quarantine: bool) -> None:
    stage, request = Stage(), a_request(prompt(0, 40), 6)
    stage.scheduler.reserve(request, stage.now)
    stage.run()
    stage.scheduler.recompute(request.attempt_id, stage.now, quarantine=quarantine)
    stage.run()
    assert stage.ids(request) == Oracle().completion(request)
    assert stage.of(request, Finished)[0].usage.num_computed_prompt_tokens == 40
    assert stage.scheduler.load().num_recomputed_tokens == 40
    assert stage.scheduler.load().kv_blocks_quarantined == (3 if quarantine else 0)
    stage.scheduler.settle(request.attempt_id)
    stage.assert_empty()


def test_a_decode_preempted_after_its_kv_came_recomputes_here_and_is_counted() -> None:
    stage, oracle = Stage(num_blocks=7, block_size=4), Oracle()
    local, remote = a_request(prompt(0, 8), 18), a_request(prompt(60, 8), 18)
    stage.scheduler.generate(local, stage.now)
    stage.scheduler.reserve(remote, stage.now)
    stage.step()
    first = stage.fill(remote, oracle)
    stage.scheduler.begin(remote.attempt_id, stage.now, first_token_id=first, first_logprobs=None, num_cached_tokens=0)
    stage.run()
    assert stage.ids(remote) == oracle.completion(remote)
    assert stage.ids(local) == oracle.completion(local)
    assert stage.scheduler.load().num_recomputed_tokens > 0
    stage.assert_empty()


def test_quarantined_blocks_are_not_handed_out_until_they_are_settled() -> None:
    stage = Stage(num_blocks=4, block_size=4)
    given_up, other = a_request(prompt(0, 12), 1), a_request(prompt(50, 8), 1)
    stage.scheduler.reserve(given_up, stage.now)
    stage.run()
    stage.scheduler.abort(given_up.attempt_id, quarantine=True)
    stage.scheduler.generate(other, stage.now)
    stage.run()
    assert not stage.of(other)
    assert stage.scheduler.load().kv_blocks_quarantined == 3
    stage.scheduler.settle(given_up.attempt_id)
    stage.run()
    assert stage.of(other, Finished)
    stage.assert_empty()


@pytest.mark.parametrize("num_resumed", [1, 2, 7, 31, 32, 33])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_goes_on_where_it_was(num_resumed: int, temperature: float) -> None:
    stage, whole = Stage(), a_request(prompt(0, 20), 40, temperature=temperature)
    expected = Oracle().completion(whole)
    resumed = a_request(prompt(0, 20), 40, temperature=temperature, resume=tuple(expected[:num_resumed]))
    stage.scheduler.generate(resumed, stage.now)
    stage.run()
    assert stage.ids(resumed) == expected[num_resumed:]
    assert stage.of(resumed, Tokens)[0].seq == num_resumed
    (finished,) = stage.of(resumed, Finished)
    assert (finished.seq, finished.usage.prompt_tokens, finished.usage.completion_tokens) == (40, 20, 40)


def test_a_resumed_requests_hit_is_whole_blocks_of_its_prompt() -> None:
    stage, whole = Stage(), a_request(prompt(0, 20), 40)
    stage.scheduler.generate(whole, stage.now)
    stage.run()
    resumed = a_request(prompt(0, 20), 40, resume=tuple(stage.ids(whole)[:30]))
    stage.scheduler.generate(resumed, stage.now)
    stage.run()
    assert stage.of(resumed, Finished)[0].usage.cached_tokens == 16, "one block of the 20; the next holds resumed ids"


def test_a_resume_that_is_complete_already_finishes_at_once() -> None:
    stage = Stage()
    request = a_request(prompt(0, 5), 2, resume=tuple(WORD_IDS[:2]))
    stage.scheduler.generate(request, stage.now)
    assert not stage.step()
    (finished,) = stage.of(request)
    assert (finished.seq, finished.reason) == (2, "length")
    with pytest.raises(RequestError, match="ended already"):
        stage.limits.check_hold(request)


def test_eos_and_stop_ids_are_not_drawn_before_min_tokens() -> None:
    stage, oracle = Stage(eos_one_in=2), Oracle(eos_one_in=2)
    for start in range(20):
        stop = StopConditions(max_tokens=30, min_tokens=10, stop_token_ids=tuple(WORD_IDS[:150]))
        request = a_request(prompt(start, 5), stop=stop)
        stage.scheduler.generate(request, stage.now)
        stage.run()
        ids = stage.ids(request)
        assert ids == oracle.completion(request)
        assert len(ids) > 10
        assert not {EOS_ID, *stop.stop_token_ids} & set(ids[:10])
        assert stage.of(request, Finished)[0].reason == "stop"


def test_ignore_eos_goes_past_eos_to_max_tokens() -> None:
    stage = Stage(eos_one_in=3)
    request = a_request(prompt(0, 5), stop=StopConditions(max_tokens=30, ignore_eos=True))
    stage.scheduler.generate(request, stage.now)
    stage.run()
    assert len(stage.ids(request)) == 30
    assert EOS_ID in stage.ids(request)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "numbers"),
    [
        (100, 1, "messages", ("100", "100")),
        (60, 41, "max_tokens", ("60", "41", "100")),
        (64, 18, "max_tokens", ("64", "18", "21", "20")),
        (81, 1, "messages", ("81", "21", "20")),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    num_prompt: int, max_tokens: int, param: str, numbers: tuple[str, ...]
) -> None:
    limits = Limits(num_blocks=20, block_size=4, max_num_seqs=4, max_batched_tokens=64, max_context_tokens=100)
    with pytest.raises(RequestError) as refused:
        limits.check_decode(a_request(prompt(0, num_prompt), max_tokens))
    assert refused.value.param == param
    for number in numbers:
        assert number in refused.value.message


def test_the_largest_request_that_fits_the_pool_runs() -> None:
    stage = Stage(num_blocks=20, block_size=4)
    request = a_request(prompt(0, 64), 17)
    stage.limits.check_decode(request)
    stage.scheduler.generate(request, stage.now)
    stage.run()
    assert len(stage.ids(request)) == 17


@pytest.mark.parametrize("name", ["queue", "prefill", "first_token", "total"])
def test_a_waiting_request_past_its_deadline_fails_naming_the_queue(name: str) -> None:
    stage = Stage(max_num_seqs=1)
    running = a_request(prompt(0, 4), 50)
    late = a_request(prompt(9, 4), 2, deadlines=Deadlines(**{name: stage.now + 5}))
    stage.scheduler.generate(running, stage.now)
    stage.scheduler.generate(late, stage.now)
    while stage.now < 1004:
        stage.step()
        assert not stage.of(late)
    stage.run()
    (failed,) = stage.of(late)
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.phase) == ("deadline_exceeded", "queue")
    assert stage.of(running, Finished)


def test_a_decoding_request_past_its_total_deadline_fails_and_one_past_its_queue_deadline_goes_on() -> None:
    stage = Stage()
    late = a_request(prompt(0, 4), 50, deadlines=Deadlines(total=stage.now + 5))
    fine = a_request(prompt(0, 4), 50, deadlines=Deadlines(queue=stage.now + 5, first_token=stage.now + 5))
    for request in (late, fine):
        stage.scheduler.generate(request, stage.now)
    stage.run()
    assert stage.of(late, Failed)[0].error.phase == "total"
    assert len(stage.ids(fine)) == 50


def test_awaited_kv_is_never_dropped_by_a_deadline_but_judged_when_it_comes() -> None:
    stage = Stage()
    request = a_request(prompt(0, 4), 50, deadlines=Deadlines(total=stage.now + 5))
    stage.scheduler.reserve(request, stage.now)
    for _ in range(10):
        stage.step()
    assert not stage.of(request, Failed)
    assert stage.scheduler.load().kv_blocks_used == 1
    stage.scheduler.begin(
        request.attempt_id, stage.now, first_token_id=WORD_IDS[0], first_logprobs=None, num_cached_tokens=0
    )
    stage.run()
    assert stage.of(request, Failed)
    stage.assert_empty()


def test_an_abort_with_an_error_gives_one_failed_and_one_without_gives_none() -> None:
    stage = Stage()
    loud, silent = a_request(prompt(0, 4), 50), a_request(prompt(0, 4), 50)
    for request in (loud, silent):
        stage.scheduler.generate(request, stage.now)
    stage.step()
    for _ in range(2):
        stage.scheduler.abort(loud.attempt_id, error=EngineError("no more").record())
        stage.scheduler.abort(silent.attempt_id)
    stage.run()
    assert [type(n) for n in stage.of(loud)] == [Begun, Tokens, Failed]
    assert [type(n) for n in stage.of(silent)] == [Begun, Tokens]
    stage.assert_empty()


def test_logprobs_are_delivered_with_each_token_the_first_included() -> None:
    stage = Stage()
    for num_logprobs in (0, 5):
        request = a_request(prompt(0, 4), 3, num_logprobs=num_logprobs)
        stage.scheduler.generate(request, stage.now)
        stage.run()
        found = [t.logprobs for t in stage.of(request, Tokens)]
        assert len(found) == 3
        assert all(len(lp) == 1 and len(lp[0].top) == num_logprobs and lp[0].logprob <= 0 for lp in found)


def test_the_phases_of_a_request_are_timed_by_the_clock_that_is_passed() -> None:
    stage = Stage(max_num_seqs=1, max_batched_tokens=8)
    first, second = a_request(prompt(0, 4), 3), a_request(prompt(9, 16), 4)
    stage.scheduler.generate(first, stage.now)
    stage.scheduler.generate(second, stage.now)
    stage.run()
    timings = stage.of(second, Finished)[0].timings
    # Steps 1-3 are the first's; the second is admitted at 4, has its first token at 5 and its last at 8.
    assert (timings.prefill_queue_s, timings.prefill_s, timings.decode_s) == (4.0, 1.0, 3.0)
    assert (timings.decode_queue_s, timings.transfer_s) == (0.0, 0.0)


def test_the_phases_of_a_reserved_request_are_its_queue_its_transfer_and_its_decode() -> None:
    stage, request = Stage(), a_request(prompt(0, 16), 4)
    stage.scheduler.reserve(request, stage.now)
    stage.step()
    stage.now += 10
    first = stage.fill(request, Oracle())
    stage.scheduler.begin(request.attempt_id, stage.now, first_token_id=first, first_logprobs=None, num_cached_tokens=0)
    stage.run()
    timings = stage.of(request, Finished)[0].timings
    assert (timings.decode_queue_s, timings.transfer_s, timings.decode_s) == (1.0, 10.0, 3.0)
    assert (timings.prefill_queue_s, timings.prefill_s) == (0.0, 0.0)


def test_an_attempt_that_comes_twice_is_served_once() -> None:
    stage, request = Stage(), a_request(prompt(0, 16), 4)
    stage.scheduler.generate(request, stage.now)
    stage.step()
    stage.scheduler.generate(request, stage.now)
    stage.scheduler.reserve(request, stage.now)
    stage.run()
    assert stage.ids(request) == Oracle().completion(request)
    assert len(stage.of(request, Finished)) == 1
    stage.assert_empty()


def test_kv_that_comes_to_a_sequence_that_awaits_none_fails_that_sequence_alone() -> None:
    stage, confused, other = Stage(), a_request(prompt(0, 16), 4), a_request(prompt(40, 16), 4)
    for request in (confused, other):
        stage.scheduler.generate(request, stage.now)
    stage.step()
    stage.scheduler.begin(confused.attempt_id, stage.now, first_token_id=5, first_logprobs=None, num_cached_tokens=0)
    stage.scheduler.begin(
        a_request([1]).attempt_id, stage.now, first_token_id=5, first_logprobs=None, num_cached_tokens=0
    )
    stage.run()
    assert stage.of(confused, Failed)[0].error.code == "engine_failed"
    assert stage.ids(other) == Oracle().completion(other)
    stage.assert_empty()


kinds = st.sampled_from(["generate", "generate", "hold", "reserve"])
submissions = st.fixed_dictionaries(
    {
        "kind": kinds,
        "start": st.integers(0, 3),
        "length": st.integers(1, 30),
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 1.0]),
        "num_resumed": st.integers(0, 3),
        "priority": st.integers(0, 1),
    }
)
acts = st.lists(
    st.one_of(
        submissions,
        st.just("step"),
        st.just("step"),
        st.sampled_from(["abort", "abort_with_error", "kv_came", "kv_lost", "kv_stuck", "release", "settle"]),
    ),
    max_size=60,
)


class Play:
    """Acts out a list of orders, keeping for each request how it may end."""

    def __init__(self, stage: Stage, oracle: Oracle) -> None:
        self.stage, self.oracle = stage, oracle
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.aborted: set[str] = set()
        self.settled_kv: set[str] = set()
        self.unsettled: set[str] = set()

    def submit(self, fields: dict[str, Any]) -> None:
        base = a_request(
            prompt(fields["start"] * 60, fields["length"]), fields["max_tokens"], temperature=fields["temperature"]
        )
        resume = tuple(self.oracle.completion(base)[: fields["num_resumed"]])
        request = a_request(
            base.token_ids,
            fields["max_tokens"],
            temperature=fields["temperature"],
            resume=resume,
            priority=fields["priority"],
        )
        kind = fields["kind"]
        try:
            check = self.stage.limits.check_hold if kind == "hold" else self.stage.limits.check_decode
            check(request)
        except RequestError:
            return
        self.requests.append((kind, request))
        if kind == "hold":
            self.stage.scheduler.hold(request, self.stage.now, report_chunks=fields["start"] == 0)
        else:
            getattr(self.stage.scheduler, kind)(request, self.stage.now)

    def awaiting(self) -> list[GenerateRequest]:
        gone = self.aborted | self.settled_kv
        return [r for _, r in self.requests if r.attempt_id not in gone and self.stage.of(r, BlocksReserved)]

    def act(self, act: object) -> None:
        scheduler = self.stage.scheduler
        if isinstance(act, dict):
            self.submit(act)
        elif act == "step":
            self.stage.step()
        elif act == "settle":
            for attempt in self.unsettled:
                scheduler.settle(attempt)
            self.unsettled.clear()
        elif act in ("abort", "abort_with_error") and self.requests:
            request = self.requests[-1][1]
            self.stage.notices += scheduler.take()
            self.aborted.add(request.attempt_id)
            error = EngineError("lost").record() if act == "abort_with_error" else None
            scheduler.abort(request.attempt_id, error=error, quarantine=True)
            self.unsettled.add(request.attempt_id)
        elif act == "release":
            for _, request in self.requests:
                if self.stage.of(request, PromptComputed):
                    scheduler.release(request.attempt_id)
        elif self.awaiting():
            self.end_waiting_for_kv(str(act), self.awaiting()[0])

    def end_waiting_for_kv(self, act: str, request: GenerateRequest) -> None:
        scheduler, now = self.stage.scheduler, self.stage.now
        if act == "kv_came":
            first = self.stage.fill(request, self.oracle)
            scheduler.begin(request.attempt_id, now, first_token_id=first, first_logprobs=None, num_cached_tokens=0)
        elif act in ("kv_lost", "kv_stuck"):
            scheduler.recompute(request.attempt_id, now, quarantine=act == "kv_stuck")
            self.unsettled.add(request.attempt_id)
        self.settled_kv.add(request.attempt_id)

    def wind_up(self) -> None:
        """Give every order that is still owed and let all requests end."""
        for _ in range(len(self.requests) + 1):
            self.act("settle")
            self.stage.run()
            self.act("release")
            while self.awaiting():
                self.act("kv_came")
        self.act("settle")
        self.stage.run()

    def judge(self) -> None:
        for kind, request in self.requests:
            told = self.stage.of(request)
            expected = self.oracle.completion(request)
            ids = self.stage.ids(request)
            assert ids == expected[: len(ids)]
            assert [t.seq for t in self.stage.of(request, Tokens)] == [len(request.resume) + i for i in range(len(ids))]
            endings = self.stage.of(request, (Finished, Failed, PromptComputed))
            if request.attempt_id in self.aborted:
                assert len(endings) <= 1 + (kind == "hold")
            else:
                assert len(endings) == 1
                assert told[-1] is endings[0]
                if kind != "hold":
                    assert ids == expected or (not ids and self.stage.limits.is_complete(request))
                else:
                    assert endings[0].first_token_id == expected[0]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    acts=acts,
    num_blocks=st.integers(8, 24),
    max_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 5),
    eos_one_in=st.sampled_from([0, 6]),
)
def test_any_order_of_orders_ends_each_request_once_with_its_own_text_and_all_blocks_back(
    acts: list[object], num_blocks: int, max_batched_tokens: int, max_num_seqs: int, eos_one_in: int
) -> None:
    stage = Stage(
        num_blocks=num_blocks,
        block_size=4,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_num_seqs,
        eos_one_in=eos_one_in,
    )
    play = Play(stage, Oracle(eos_one_in=eos_one_in))
    for act in acts:
        play.act(act)
    play.wind_up()
    play.judge()
    stage.assert_empty()
