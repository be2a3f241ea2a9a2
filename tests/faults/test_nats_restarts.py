"""The bus itself fails: streams go on, the fleet comes back by itself, nobody is taken for dead meanwhile."""

import asyncio
import time

import pytest

from bus.lease_store import RECORD_TTL_S
from bus.record_watch import CONSUMER_INACTIVE_S
from schemas.worker import Record
from tests.faults.asking import Answer
from tests.faults.cluster import run_cluster
from tests.faults.cost import Cost
from tests.faults.stack import Stack, run_stack

PAIR = ("g0", "r0", "p1", "d1")
MANY = {"max_num_seqs": 128, "num_blocks": 4096}
NUM_STREAMS = 100
in_the_package = pytest.mark.asyncio(loop_scope="package")


async def a_hundred_streams(stack: Stack) -> list[Answer]:
    """Return them once each has begun."""
    answers = [stack.ask(stack.prompt(20), 250, via=via) for via in ("http", "bus") for _ in range(NUM_STREAMS // 2)]
    for answer in answers:
        await answer.begun(timeout_s=60.0)
    return answers


async def whole(answers: list[Answer]) -> None:
    for answer in answers:
        (await answer.over(timeout_s=60.0)).check_whole()


async def taken_within_moments(stack: Stack) -> None:
    """A new request may hear that nobody is there while a worker changes its node: 503, with Retry-After."""
    for via in ("http", "bus"):
        answer = await stack.ask(stack.prompt(), via=via).over()  # type: ignore[arg-type]
        while (answer.status, bool(answer.retry_after), answer.has_begun) == (503, True, False):
            await asyncio.sleep(1.0)
            answer = await stack.ask(stack.prompt(), via=via).over()  # type: ignore[arg-type]
        answer.check_whole()


def check_no_stampede(cost: Cost) -> None:
    """A question or three a stream; where the machine is too busy to answer within a second a stream may move, once."""
    assert cost.num_resends <= 3 * NUM_STREAMS, cost
    assert cost.num_resubmits <= NUM_STREAMS // 4, cost


@in_the_package
async def test_nats_restarted_under_100_streams(stack: Stack) -> None:
    await stack.have(*PAIR, **MANY)
    before = await stack.cost()
    answers = await a_hundred_streams(stack)
    await stack.server.stop()
    await stack.server.start()
    await whole(answers)
    check_no_stampede((await stack.cost()).since(before))
    await stack.settled(PAIR)


@in_the_package
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
    await whole([*streaming, *prefilling, *stack.ask_both()])
    await stack.settled(PAIR)


@in_the_package
async def test_nats_away_for_three_times_a_records_life(stack: Stack) -> None:
    """All come back by themselves: the same processes, with one record each, written a few times and no more."""
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
    await check_bucket(stack, PAIR, max_writes=5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("handoff", ["pull", "rendezvous"])
async def test_a_cluster_loses_its_leader_under_100_streams(handoff: str) -> None:
    """The node that leads the bucket of records and, in turn, the next one that does. Core NATS is back in a moment,
    the records in seconds: meanwhile nobody is taken for dead, streams go on, and afterwards a worker can join."""
    async with run_cluster() as cluster, run_stack(handoff, cluster=cluster) as stack:  # type: ignore[arg-type]
        await stack.have(*PAIR, **MANY)
        gone: list[Record] = []
        stack.fleet.on_change(lambda kind, record: gone.append(record) if kind == "left" else None)
        for newcomer in ("d2", "d3"):
            before = await stack.cost()
            answers = await a_hundred_streams(stack)
            leader = await cluster.leader_of(stack.bus, f"KV_{stack.bus.subjects.runtime_bucket}")
            leader.kill()
            await taken_within_moments(stack)
            await whole(answers)
            check_no_stampede((await stack.cost()).since(before))
            await cluster.until_writable()
            stack.start(newcomer, **MANY)
            await stack.until_live(newcomer)
            await stack.until_served_by(newcomer, stage="decoding")
            leader.start()
            await cluster.until_writable()
        assert not gone
        members = (*PAIR, "d2", "d3")
        await stack.settled(members)
        await check_bucket(stack, members)


async def check_bucket(stack: Stack, members: tuple[str, ...], *, max_writes: int = 0) -> None:
    """No record is a zombie's, and once the server has forgotten the watches of lost connections each member, and this
    process, has one. `max_writes` is per member."""
    stream = f"KV_{stack.bus.subjects.runtime_bucket}"
    state = (await stack.bus.jetstream().stream_info(stream)).state
    assert len(stack.fleet.all_records) == state.messages == len(members), (stack.fleet.all_records.keys(), state)
    assert not max_writes or state.last_seq <= max_writes * len(members), state
    async with asyncio.timeout(3 * CONSUMER_INACTIVE_S):
        while state.consumer_count != len(members) + 1:
            await asyncio.sleep(0.25)
            state = (await stack.bus.jetstream().stream_info(stream)).state
