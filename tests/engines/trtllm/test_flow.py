"""Real client, router, workers and nats-server around two TensorRT-LLM engines that are stand-ins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.server import NatsServer
from schemas.frames import Tokens
from schemas.request import StopConditions
from tests.engines.paged.fleet import prompt
from tests.engines.trtllm.scene import CARD, SOON, make_engine
from tests.engines.trtllm.stand_in_executor import Fabric
from tests.flow.stack import Stack, stack, start_worker, until_ready

pytestmark = pytest.mark.usefixtures("no_leaks")


@asynccontextmanager
async def trtllm_stack(server: NatsServer, fabric: Fabric, *names: str, **switches: object) -> AsyncIterator[Stack]:
    """A router and workers named by role, as in tests.flow.stack."""
    roles = {"p": "prefill", "d": "decode", "b": "both"}
    async with asyncio.TaskGroup() as tasks, stack(server) as here:
        for name in names:
            engine = make_engine(fabric, roles[name[0]], **switches)  # type: ignore[arg-type]
            start_worker(here, tasks, name, engine=engine)
        await until_ready(here)
        yield here


async def test_a_request_goes_through_both_workers_and_reads_as_from_one(nats_server):
    async with trtllm_stack(nats_server, Fabric(), "b") as alone:
        expected = {length: (await alone.generate(prompt(length), max_tokens=12)).ids for length in (3, 40)}
    fabric = Fabric()
    async with trtllm_stack(nats_server, fabric, "p", "d") as here:
        for length, ids in expected.items():
            outcome = await here.generate(prompt(length), max_tokens=12, num_logprobs=2)
            assert outcome.ids == ids
            assert len(outcome.logprobs) == 12
            assert (outcome.prefilled_by, outcome.decoded_by) == ("p", "d")
            assert outcome.finished.usage.completion_tokens == 12
            assert outcome.finished.timings.prefill_s > 0
        one = await here.generate(prompt(40), max_tokens=1)
        assert (one.ids, one.decoded_by, one.finished.reason) == (expected[40][:1], "", "length")
        await here.all_free()
        assert sorted(llm.executor.num_transfers for llm in fabric.llms) == [0, 2]
        assert here["d"].load().num_remote_prefills == 2


async def test_eos_in_prefill_ends_the_request_without_a_decode_leg(nats_server):
    async with trtllm_stack(nats_server, Fabric(), "p", "d", first_token=CARD.eos_token_ids[0]) as here:
        outcome = await here.generate(prompt(9), max_tokens=12)
        assert (outcome.ids, outcome.finished.reason) == ([CARD.eos_token_ids[0]], "stop")
        assert outcome.decoded_by == ""
        await here.all_free()


async def test_a_client_that_leaves_in_any_phase_leaves_nothing_behind(nats_server):
    fabric = Fabric()
    async with trtllm_stack(nats_server, fabric, "p", "d", engine_args=SOON, kv_load_failure="recompute") as here:
        for number in range(9):
            seen = 0

            def leaves(frame: object, number: int = number) -> bool:
                nonlocal seen
                seen += isinstance(frame, Tokens) or number % 3 != 0
                return seen > number % 3

            await here.generate(prompt(12 + number), on_frame=leaves, stop=StopConditions(max_tokens=200))
        await here.all_free()
        # The executor lets an aborted request go in its next iteration, after the worker has let it go.
        await here.until(lambda: not any(llm.executor.num_used_blocks() for llm in fabric.llms))
        assert [llm.executor.aborts_in_transfer for llm in fabric.llms] == [[], []]


async def test_many_streams_at_once(nats_server):
    async with trtllm_stack(nats_server, Fabric(), "p1", "p2", "d1", "d2") as here:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(here.generate(prompt(8, salt), max_tokens=10)) for salt in range(24)]
        outcomes = [task.result() for task in running]
        assert all(len(outcome.ids) == 10 for outcome in outcomes)
        assert {outcome.decoded_by for outcome in outcomes} == {"d1", "d2"}
        await here.all_free()
