"""The bus itself fails: streams go on, the fleet comes back by itself, nobody is taken for dead meanwhile."""

import asyncio
import time

import pytest

from bus.lease_store import RECORD_TTL_S
from tests.faults.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
MANY = {"max_num_seqs": 128, "num_blocks": 4096}


async def test_nats_restarted_under_100_streams(stack: Stack) -> None:
    await stack.have(*PAIR, **MANY)
    answers = [stack.ask(stack.prompt(20), 250, via=via) for via in ("http", "bus") for _ in range(50)]
    for answer in answers:
        await answer.begun(timeout_s=60.0)
    await stack.server.stop()
    await stack.server.start()
    for answer in answers:
        (await answer.over(timeout_s=60.0)).check_whole()
    await stack.settled(PAIR)


async def test_nats_killed_while_requests_are_in_every_phase(stack: Stack) -> None:
    await stack.have(*PAIR)
    streaming = stack.ask_both(900)
    for answer in streaming:
        await answer.begun()
    with stack["p1"].paused("before_prefill"):
        prefilling = stack.ask_both()
        await stack["p1"].hit("before_prefill")
        stack.server.kill()
        await stack.server.start()
    late = stack.ask_both()
    for answer in (*streaming, *prefilling, *late):
        (await answer.over(timeout_s=60.0)).check_whole()
    await stack.settled(PAIR)


@pytest.mark.slow
async def test_nats_away_for_three_times_a_records_life(stack: Stack) -> None:
    if stack.handoff == "rendezvous":
        pytest.skip("no request is under way: one handoff is enough")
    await stack.have(*PAIR)
    pids = {name: stack[name].pid for name in PAIR}
    await stack.server.stop()
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=3 * RECORD_TTL_S)
    await stack.server.start()
    began = time.monotonic()
    await stack.settled(PAIR)
    assert time.monotonic() - began < 15.0
    assert {name: stack[name].pid for name in PAIR} == pids
