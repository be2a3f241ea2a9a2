"""Members that leave in order, change their role, vanish all at once, and join: under load, and nothing is lost."""

import signal
import time

import pytest

from deploy.draining import change_role, drain_worker
from schemas.ids import WorkerId
from schemas.message import decode
from schemas.worker import LoadReport
from tests.conftest import wait_until
from tests.faults.load import steady_load
from tests.faults.stack import READY_TIMEOUT_S, Stack, promptly

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
EVERYBODY = ("g0", "g1", "r0", "r1", "p1", "p2", "d1", "d2")


async def test_a_drain_of_each_service_under_load_loses_nothing(stack: Stack) -> None:
    """By SIGTERM and by `busway drain`. Whoever has left comes back, so that the next one can go."""
    await stack.have(*EVERYBODY)
    async with steady_load(stack, num_clients=6) as load:
        for name in ("p1", "d1", "r0", "g0"):
            await load.more(12)
            stack[name].signal(signal.SIGTERM)
            assert await stack[name].ended() == 0
            stack[name].start()
            await stack.until_live(name)
        for name in ("p2", "d2"):
            await load.more(12)
            await drain_worker(stack.bus, WorkerId(name), grace_s=None)
            assert await stack[name].ended() == 0
        await load.more(12)
    load.check_all_whole()
    await stack.all_free()


async def test_a_worker_changes_its_role_under_load_and_keeps_its_weights(stack: Stack) -> None:
    await stack.have("g0", "r0", "p1", "d1", "d2")
    pid, epoch = stack["d2"].pid, stack.fleet.workers[WorkerId("d2")].epoch
    async with steady_load(stack, num_clients=6) as load:
        await load.more(12)
        await change_role(stack.bus, WorkerId("d2"), "prefill", grace_s=None)
        await stack.until_served_by("d2", stage="prefilling")
        await load.more(12)
        await change_role(stack.bus, WorkerId("p1"), "decode", grace_s=None)
        await stack.until_served_by("p1", stage="decoding")
        await load.more(12)
        for name, role in (("p1", "prefill"), ("d2", "decode")):
            assert await stack.command("role", name, role) == f"{name} serves as {role}\n"
    load.check_all_whole()
    assert (stack["d2"].pid, stack.fleet.workers[WorkerId("d2")].epoch) == (pid, epoch)
    await stack.until_served_by("d2", stage="decoding")
    await stack.all_free()


async def test_a_drain_past_its_grace_hands_streams_on(stack: Stack) -> None:
    """To the other decode worker, where they go on at the very token."""
    await stack.have("g0", "r0", "p1", "d1", "d2")
    answers = [stack.ask(stack.prompt(), 900, via=via) for via in ("http", "bus", "http", "bus")]
    for answer in answers:
        await answer.begun()
    began = time.monotonic()
    await drain_worker(stack.bus, WorkerId("d1"), grace_s=0.2)
    assert time.monotonic() - began < promptly(4.0)
    assert await stack["d1"].ended() == 0
    for answer in answers:
        (await answer.over()).check_whole()
    assert any(answer.num_resubmits == 1 for answer in answers)
    await stack.all_free()


async def test_a_prefill_worker_waits_until_its_kv_is_fetched(stack: Stack) -> None:
    await stack.have("g0", "r0", "p1", "p2", "d1")
    mover = ("d1",) if stack.handoff == "pull" else ("p1", "p2")
    with stack.paused("mid_transfer", *mover):
        answers = [*stack.ask_both(), *stack.ask_both()]
        await stack[mover[0]].hit("mid_transfer")
        stack["p1"].signal(signal.SIGTERM)
        await stack.until_state("p1", "draining")
        assert stack["p1"].is_running
    for answer in answers:
        (await answer.over()).check_whole()
    assert await stack["p1"].ended() == 0
    assert (await stack.load("d1")).num_recomputed_tokens == 0
    await stack.all_free()


async def test_a_worker_that_comes_back_changed_under_its_id_starts_clean(stack: Stack) -> None:
    """Killed, and started again before anybody has noticed, with blocks of another size: nobody takes it for the one it
    was, and as it is it matches no decode worker. Then it is its old self again."""
    await stack.have(*PAIR)
    for tuning, stages in (
        ({"block_size": 32}, ["accepted", "decoding"]),
        ({}, ["accepted", "prefilling", "decoding"]),
    ):
        stack["p1"].kill()
        stack.start("p1", **tuning)
        during = stack.ask_both()
        await stack.until_live("p1")
        for answer in during:
            (await answer.over()).check_whole()
        after = stack.ask(stack.prompt())
        (await after.over()).check_whole()
        assert after.stages == stages
        assert ("never paired" in await stack.command("status")) == ("prefilling" not in stages)
    await stack.settled(PAIR)


async def test_all_decode_workers_vanish_and_new_ones_come(stack: Stack) -> None:
    """Requests under way wait for them and go on; new ones are told 503 at once."""
    await stack.have(*PAIR)
    answers = stack.ask_both(900)
    for answer in answers:
        await answer.begun()
    stack["d1"].kill()
    await stack.until_gone("d1")
    for refused in stack.ask_both():
        (await refused.over(timeout_s=promptly(2.0))).check_failed("unavailable")
        assert (refused.status, bool(refused.retry_after)) == (503, True)
    stack.start("d2")
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.settled(("g0", "r0", "p1", "d2"))


async def test_a_worker_gets_traffic_within_a_second_of_joining(stack: Stack) -> None:
    """A worker beats when it joins and then twice a second: less than a second is less than three beats."""
    await stack.have(*PAIR)
    subjects, seen = stack.bus.subjects, list[str]()

    def on_load(subject: str, payload: bytes) -> None:
        if decode(payload, LoadReport).num_generated_tokens:
            seen.append("traffic")

    spies = [
        await stack.bus.listen(subjects.heartbeat("worker", "d2"), lambda *_: seen.append("beat")),
        await stack.bus.listen(subjects.load("sim", "d2"), on_load),
    ]
    async with steady_load(stack, num_clients=4) as load:
        await load.more(4)
        stack.start("d2")
        await wait_until(lambda: "traffic" in seen, READY_TIMEOUT_S)
    assert seen[: seen.index("traffic")].count("beat") < 3
    load.check_all_whole()
    for spy in spies:
        await spy.stop()
    await stack.all_free()
