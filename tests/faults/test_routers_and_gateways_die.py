"""A router is killed at every moment of its part; a gateway is killed with everything that it was doing."""

import time

import pytest

from tests.faults.stack import READY_TIMEOUT_S, Stack, promptly

pytestmark = pytest.mark.asyncio(loop_scope="package")

TWO_ROUTERS = ("g0", "r0", "r1", "p1", "d1")
PAIR = ("g0", "r0", "p1", "d1")
COMMAND_START_S = 1.5
"""What a Python program takes to start and to connect."""


async def test_router_killed_before_prefill(stack: Stack) -> None:
    """Its hops lie unread at a worker that stands still for a moment; nobody waits for what that computes."""
    await stack.have(*TWO_ROUTERS)
    async with stack["p1"].frozen():
        answers = await stack.ask_until_held_by("r0")
        stack["r0"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_router_killed_between_the_legs(stack: Stack) -> None:
    """Pull: prefill has nobody to give its tickets to. Rendezvous: decode is asked and hasn't answered."""
    await stack.have(*TWO_ROUTERS)
    if stack.handoff == "pull":
        with stack["p1"].paused("before_ticket"):
            answers = await stack.ask_until_held_by("r0")
            await stack["p1"].hit("before_ticket")
            stack["r0"].kill()
    else:
        async with stack["d1"].frozen():
            answers = await stack.ask_until_held_by("r0")
            await stack.until_load("p1", lambda load: load.kv_blocks_used > 0)
            stack["r0"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_router_killed_after_decode_began(stack: Stack) -> None:
    """It isn't missed: only new requests need one."""
    await stack.have(*PAIR)
    answers = stack.ask_both(900)
    for answer in answers:
        await answer.begun()
    stack["r0"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
        assert answer.num_resubmits == 0
    await stack.until_gone("r0")
    for nobody in stack.ask_both():
        (await nobody.over(timeout_s=promptly(3.0))).check_failed("no_responders", "unavailable")
        assert nobody.status == 503
    await stack.all_free()


async def test_gateway_killed(stack: Stack) -> None:
    """Its clients see the connection end; what it asked for is freed, whoever holds it; nobody else notices."""
    await stack.have("g0", "g1", "r0", "p1", "d1")
    doomed = [stack.ask(stack.prompt(), 3900, via="http", gateway="g0") for _ in range(4)]
    others = [stack.ask(stack.prompt(), 900, via="http", gateway="g1"), stack.ask(stack.prompt(), 900)]
    for answer in (*doomed, *others):
        await answer.begun()
    with stack["p1"].paused("before_prefill"):
        doomed.append(stack.ask(stack.prompt(), via="http", gateway="g0"))
        await stack["p1"].hit("before_prefill")
        stack["g0"].kill()
        await stack.until_gone("g0")
    for answer in doomed:
        (await answer.over(timeout_s=promptly(2.0))).check_failed("connection_lost")
    await stack.until_load("d1", lambda load: load.running <= len(others), promptly(1.0))
    for answer in others:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_a_gateway_without_workers_or_routers_says_so(stack: Stack) -> None:
    """/ready and `busway status` are true within 2 s of the judgement that somebody is gone."""
    await stack.have(*PAIR)
    assert await stack.readiness("g0") == (200, "disaggregated")
    stack["p1"].kill()
    await stack.until_readiness("g0", (200, "aggregated"), promptly(3.0))
    stack["d1"].kill()
    await stack.until_readiness("g0", (503, "nothing"), promptly(3.0))
    states = await stack.states()
    assert {states[name] for name in ("p1", "d1")} <= {"lost", "gone"}
    for answer in stack.ask_both():
        (await answer.over(timeout_s=promptly(2.0))).check_failed("unavailable")
        assert (answer.status, bool(answer.retry_after)) == (503, True)
    for name in ("p1", "d1"):
        stack[name].start()
    await stack.until_readiness("g0", (200, "disaggregated"), READY_TIMEOUT_S)
    await stack.settled(PAIR)


async def test_a_worker_whose_engine_died_exits_non_zero_and_its_requests_go_on(stack: Stack) -> None:
    await stack.have("g0", "r0", "p1", "d1", "d2")
    answers = [stack.ask(stack.prompt(), 900, via=via) for via in ("http", "bus", "http", "bus")]
    for answer in answers:
        await answer.begun()
    stack["d1"].break_engine()
    assert await stack["d1"].ended(promptly(3.0)) not in (0, None)
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


@pytest.mark.parametrize(("name", "readiness"), [("r0", (503, "disaggregated")), ("d1", (503, "nothing"))])
async def test_ready_and_status_tell_of_who_stands_still_and_of_his_waking(
    stack: Stack, name: str, readiness: tuple[int, str]
) -> None:
    """Silence is noticed 2 s after the last life sign, which comes twice a second; status looks for itself."""
    await stack.have(*PAIR)
    async with stack[name].frozen():
        began = time.monotonic()
        rows = await stack.status_rows()
        assert time.monotonic() - began < promptly(2.0) + COMMAND_START_S
        assert rows[name] == "lost"
        assert {rows[other] for other in PAIR if other != name} == {"ready"}
        await stack.until_readiness("g0", readiness, promptly(3.0))
    await stack.until_readiness("g0", (200, "disaggregated"), promptly(2.0))
    assert set((await stack.status_rows()).values()) == {"ready"}
    await stack.settled(PAIR)
