"""The engine's thread with the sim model: the Desk as the handoffs see it."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import EngineError, RequestError
from schemas.frames import Failed, Finished, Tokens
from schemas.request import Deadlines, GenerateRequest, StopConditions
from services.engines.paged.desk import BlocksReserved, Notice, PromptComputed
from services.engines.paged.loop import EngineThread
from services.engines.paged.runner import Sampled, Slice
from services.engines.sim.runner import SimRunner
from tests.engines.scenes import WORD_IDS, Oracle, a_request, allocate

_numbers = itertools.count()


class Office:
    """A started engine thread and everything it has said, in the calls in which it said it."""

    def __init__(self, runner: SimRunner) -> None:
        self.runner = runner
        self.thread_name = f"engine under test {next(_numbers)}"
        self.desk = EngineThread(runner, allocate, name=self.thread_name)
        self.calls: list[list[Notice]] = []
        self.changed = asyncio.Event()
        self.threads: set[str] = set()

    def notify(self, notices: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(list(notices))
        self.changed.set()

    def of(self, request: GenerateRequest, kind: Any = object) -> list[Any]:
        return [n for call in self.calls for n in call if n.attempt_id == request.attempt_id and isinstance(n, kind)]

    def ids(self, request: GenerateRequest) -> list[int]:
        return [i for tokens in self.of(request, Tokens) for i in tokens.token_ids]

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self, *requests: GenerateRequest) -> None:
        await self.until(lambda: all(self.of(request, (Finished, Failed)) for request in requests))

    async def is_empty(self) -> None:
        """Wait until nothing is left: orders take effect between two steps."""
        async with asyncio.timeout(10):
            while True:
                load = self.desk.load()
                if not (load.running or load.waiting or load.num_held or load.kv_blocks_used):
                    break
                await asyncio.sleep(0.002)
        assert (load.kv_blocks_quarantined, load.queued_prefill_tokens) == (0, 0)


@asynccontextmanager
async def an_office(**engine_args: object) -> AsyncIterator[Office]:
    office = Office(SimRunner({name: str(value) for name, value in engine_args.items()}))
    await office.desk.start(office.notify)
    try:
        yield office
    finally:
        await office.desk.stop()
    await office.desk.join()
    assert not any(thread.name == office.thread_name for thread in threading.enumerate())


def prompt(start: int, length: int) -> list[int]:
    return [WORD_IDS[(start + i) % len(WORD_IDS)] for i in range(length)]


async def hand_over(source: Office, target: Office, request: GenerateRequest, target_request: GenerateRequest) -> None:
    """Prefill on one engine, copy the KV's bytes into the other's pool, and begin there."""
    source.desk.hold(request, report_chunks=False)
    target.desk.reserve(target_request)
    await source.until(lambda: source.of(request, PromptComputed))
    await target.until(lambda: target.of(target_request, BlocksReserved))
    (computed,), (reserved,) = source.of(request, PromptComputed), target.of(target_request, BlocksReserved)
    assert len(computed.block_ids) == len(reserved.block_ids)
    copy_blocks(source, target, computed.block_ids, reserved.block_ids, skip=reserved.num_cached_blocks)
    source.desk.release(request.attempt_id)
    target.desk.begin(
        target_request.attempt_id,
        first_token_id=computed.first_token_id,
        first_logprobs=computed.first_logprobs,
        num_cached_tokens=computed.num_cached_tokens,
    )
    await target.ended(target_request)


def copy_blocks(source: Office, target: Office, from_ids: Any, to_ids: Any, *, skip: int) -> None:
    block_size = target.desk.region().layout.block_size
    for from_id, to_id in list(zip(from_ids, to_ids, strict=True))[skip:]:
        for offset in range(block_size):
            row = source.runner._pool.read(from_id * block_size + offset)
            target.runner._pool.write(to_id * block_size + offset, *row)


async def test_a_handed_over_request_reads_as_one_generated_in_one_place() -> None:
    async with an_office() as prefill, an_office() as decode:
        for length, temperature in ((1, 0.0), (15, 1.0), (16, 0.0), (17, 0.7), (100, 0.0), (100, 1.0)):
            request = a_request(prompt(length, length), 40, temperature=temperature)
            await hand_over(prefill, decode, request, request)
            assert decode.ids(request) == Oracle().completion(request)
            (finished,) = decode.of(request, Finished)
            assert finished.usage.num_computed_prompt_tokens == 0
        assert decode.desk.load().num_recomputed_tokens == 0
        await prefill.is_empty()
        await decode.is_empty()


async def test_wrong_prompt_ids_with_the_real_kv_give_the_real_output() -> None:
    async with an_office() as prefill, an_office() as decode:
        real, wrong = a_request(prompt(0, 50), 30), a_request(prompt(99, 50), 30)
        await hand_over(prefill, decode, real, wrong)
        assert decode.ids(wrong) == Oracle().completion(real)
        assert decode.of(wrong, Finished)[0].usage.num_computed_prompt_tokens == 0


async def test_a_request_continued_on_another_engine_goes_on_exactly() -> None:
    whole = a_request(prompt(5, 30), 50, temperature=1.0)
    expected = Oracle().completion(whole)
    async with an_office() as prefill, an_office() as decode:
        for num_resumed in (1, 20, 49):
            rest = a_request(prompt(5, 30), 50, temperature=1.0, resume=tuple(expected[:num_resumed]))
            if num_resumed == 49:
                decode.desk.generate(rest)
                await decode.ended(rest)
            else:
                await hand_over(prefill, decode, rest, rest)
            assert decode.ids(rest) == expected[num_resumed:]
            assert decode.of(rest, Tokens)[0].seq == num_resumed
            assert decode.of(rest, Finished)[0].usage.completion_tokens == 50


async def test_two_hundred_mixed_requests_leave_nothing_behind() -> None:
    dice = random.Random(3)
    oracle = Oracle(eos_one_in=40)
    async with an_office(eos_one_in=40, num_blocks=120, max_num_seqs=32, max_batched_tokens=128) as office:
        kept: list[GenerateRequest] = []
        for number in range(200):
            request = a_request(
                prompt(dice.randrange(4) * 50, dice.randint(1, 80)),
                dice.randint(1, 30),
                temperature=dice.choice((0, 1)),
            )
            match number % 5:
                case 0:
                    office.desk.hold(request, report_chunks=False)
                    office.desk.abort(request.attempt_id)
                case 1:
                    office.desk.reserve(request)
                    office.desk.abort(request.attempt_id, error=EngineError("staged").record())
                case 2:
                    office.desk.reserve(request)
                    office.desk.recompute(request.attempt_id)
                    kept.append(request)
                case _:
                    office.desk.generate(request)
                    kept.append(request)
            if not number % 16:
                await asyncio.sleep(0)
        await office.ended(*kept)
        for request in kept:
            assert office.ids(request) == oracle.completion(request)
            assert len(office.of(request, (Finished, Failed))) == 1
        await office.is_empty()


async def test_all_tokens_of_a_step_come_in_one_call_on_the_event_loops_thread() -> None:
    async with an_office(decode_ms_per_step=5) as office:
        requests = [a_request(prompt(9 * i, 5), 10) for i in range(8)]
        for request in requests:
            office.desk.generate(request)
        await office.ended(*requests)
        assert office.threads == {threading.current_thread().name}
        decoding = [call for call in office.calls if any(isinstance(n, Tokens) and n.seq == 5 for n in call)]
        assert len(decoding) == 1


async def test_an_abort_is_silent_at_once_and_frees_everything_within_a_step() -> None:
    async with an_office(decode_ms_per_step=1) as office:
        request = a_request(prompt(0, 40), 10_000)
        office.desk.generate(request)
        await office.until(lambda: len(office.ids(request)) >= 3)
        progress, num_told = office.desk.load().progress, len(office.ids(request))
        office.desk.abort(request.attempt_id)
        await office.is_empty()
        # The step under way, and one that may have begun between looking and aborting.
        assert office.desk.load().progress <= progress + 2
        other = a_request(prompt(0, 4), 2)
        office.desk.generate(other)
        await office.ended(other)
        assert len(office.ids(request)) == num_told
        assert not office.of(request, (Finished, Failed))


@pytest.mark.parametrize("num_aborts", [1, 2])
async def test_an_attempt_that_comes_right_behind_its_abort_is_heard(num_aborts: int) -> None:
    """All of it in one turn of the engine, held up until all of it is there."""
    async with an_office() as office:
        request, is_there = a_request(prompt(3, 9), 4), threading.Event()
        office.desk._steps.post(lambda now: is_there.wait() and None)
        for _ in range(num_aborts):
            office.desk.abort(request.attempt_id)
        office.desk.reserve(request)
        is_there.set()
        await office.until(lambda: office.of(request, BlocksReserved), 5.0)
        office.desk.abort(request.attempt_id)
        await office.is_empty()


async def test_of_two_aborts_only_notices_come_out() -> None:
    """The second is given before the first one's end is delivered, and applied after it."""
    async with an_office() as office:
        request, may_go_on = a_request(prompt(3, 9), 4), threading.Event()
        other = a_request(prompt(5, 9), 4)
        office.desk.abort(request.attempt_id)
        while not office.desk._outbox._pending:
            time.sleep(0.001)  # noqa: ASYNC251  the event loop must not turn before the second one
        office.desk._steps.post(lambda now: may_go_on.wait() and None)
        office.desk.abort(request.attempt_id)
        await asyncio.sleep(0)
        may_go_on.set()
        office.desk.generate(other)
        await office.ended(other)
        assert office.of(request) == []


async def test_aborting_two_hundred_requests_that_await_kv_leaks_no_block() -> None:
    async with an_office(num_blocks=64, max_num_seqs=8) as office:
        requests = [a_request(prompt(i, 20), 4) for i in range(200)]
        for request in requests:
            office.desk.reserve(request)
        await office.until(lambda: sum(bool(office.of(r, BlocksReserved)) for r in requests) == 8)
        for request in requests:
            office.desk.abort(request.attempt_id)
        await office.is_empty()


async def test_an_idle_engine_is_blocked_and_uses_no_processor() -> None:
    async with an_office() as office:
        request = a_request(prompt(0, 4), 2)
        office.desk.generate(request)
        await office.ended(request)
        progress = office.desk.load().progress
        before = time.process_time()
        await asyncio.sleep(0.09)
        assert time.process_time() - before < 0.03
        assert office.desk.load().progress == progress


async def test_a_waiting_request_is_dropped_at_its_deadline_though_no_step_runs() -> None:
    async with an_office(num_blocks=4, block_size=4) as office:
        held = a_request(prompt(0, 16), 2)
        office.desk.hold(held, report_chunks=False)
        await office.until(lambda: office.of(held, PromptComputed))
        late = a_request(prompt(0, 16), 1, deadlines=Deadlines(queue=time.time() + 0.05))
        office.desk.generate(late)
        await office.ended(late)
        assert office.of(late, Failed)[0].error.phase == "queue"
        office.desk.release(held.attempt_id)
        await office.is_empty()


async def test_load_counts_a_request_from_the_moment_it_is_taken() -> None:
    async with an_office(prefill_ms_per_token=1, max_num_seqs=1) as office:
        for taken in range(1, 9):
            office.desk.generate(a_request(prompt(0, 10), 2))
            load = office.desk.load()
            assert load.running + load.waiting == taken
            assert load.queued_prefill_tokens >= 10 * (taken - 1)


async def test_a_request_that_can_never_fit_is_refused_at_the_desk() -> None:
    async with an_office(num_blocks=4, max_context_tokens=1000) as office:
        for order in (office.desk.generate, office.desk.reserve):
            with pytest.raises(RequestError, match="4"):
                order(a_request(prompt(0, 60), 40))
        with pytest.raises(RequestError, match="65"):
            office.desk.hold(a_request(prompt(0, 65), 1), report_chunks=False)
        office.desk.hold(a_request(prompt(0, 60), 40), report_chunks=False)


@pytest.mark.parametrize(("point", "num_told"), [("before_prefill", 0), ("after_first_token", 1)])
async def test_a_paused_step_holds_the_engine_with_work_and_without_progress(
    tmp_path: Path, point: str, num_told: int
) -> None:
    pause = tmp_path / f"{point}.pause"
    pause.touch()
    async with an_office(pause_dir=tmp_path) as office:
        request = a_request(prompt(0, 20), 6)
        office.desk.generate(request)
        async with asyncio.timeout(5):
            hits = tmp_path / f"{point}.hit"
            while not (hits.exists() and hits.read_text()):  # noqa: ASYNC110  (files set no event)
                await asyncio.sleep(0.002)
        if num_told:
            await office.until(lambda: len(office.ids(request)) == num_told)
        load = office.desk.load()
        assert (load.running, load.progress) == (1, num_told)
        assert hits.read_text().split() == [request.attempt_id]
        pause.unlink()
        await office.ended(request)
        assert office.ids(request) == Oracle().completion(request)


class BrokenRunner(SimRunner):
    """A sim model whose third step raises, as a device error would."""

    num_steps = 0

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("device lost")
        return super().execute(slices)


async def raises_soon(awaitable: Awaitable[None], match: str) -> EngineError:
    with pytest.raises(EngineError, match=match) as raised:
        async with asyncio.timeout(5):
            await awaitable
    return raised.value


async def test_a_runner_that_raises_ends_the_thread_and_join_raises_its_error() -> None:
    office = Office(BrokenRunner({}))
    await office.desk.start(office.notify)
    office.desk.generate(a_request(prompt(0, 4), 20))
    error = await raises_soon(office.desk.join(), "device lost")
    assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(EngineError):
        office.desk.generate(a_request(prompt(0, 4), 20))
    await office.desk.stop()


async def test_a_notify_that_raises_ends_the_engine_too() -> None:
    def notify(notices: object) -> None:
        raise KeyError("a bug of ours")

    desk = EngineThread(SimRunner({}), allocate)
    await desk.start(notify)
    desk.generate(a_request(prompt(0, 4), 20))
    await raises_soon(desk.join(), "a bug of ours")
    await desk.stop()


async def test_a_model_that_cannot_be_loaded_fails_the_start() -> None:
    def no_memory(num_bytes: int) -> memoryview:
        raise MemoryError(f"{num_bytes} bytes")

    desk = EngineThread(SimRunner({}), no_memory)
    with pytest.raises(MemoryError):
        await desk.start(lambda notices: None)
    await desk.stop()


async def test_a_slow_event_loop_gets_the_steps_it_missed_in_order_and_the_engine_waits_for_it() -> None:
    async with an_office() as office:
        request = a_request(prompt(0, 4), 500, stop=StopConditions(max_tokens=500))
        office.desk.generate(request)
        await office.until(lambda: office.ids(request))
        time.sleep(0.05)  # noqa: ASYNC251  (the event loop itself is what must be slow)
        assert office.desk.load().num_generated_tokens - len(office.ids(request)) < 20
        await office.ended(request)
        assert [t.seq for t in office.of(request, Tokens)] == list(range(500))


async def test_a_step_of_the_wall_clock_neither_ends_a_request_nor_falsifies_its_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deadlines come in Unix time and are moved to the monotonic clock once; an hour's jump afterwards is nobody's."""
    wall = time.time
    async with an_office(decode_ms_per_step=5) as office:
        request = a_request(prompt(0, 16), 6, deadlines=Deadlines(total=time.time() + 30))
        office.desk.generate(request)
        monkeypatch.setattr(time, "time", lambda: wall() + 3600)
        await office.ended(request)
        (finished,) = office.of(request, Finished)
        assert 0.02 < finished.timings.decode_s < 10
        assert 0 <= finished.timings.prefill_queue_s < 10
