"""What requests and settings say of routing, from where it is said to where it is seen: priority, session, salt,
labels; and the router's own account of a known workload."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from bus.server import NatsServer
from schemas.frames import Frame, Tokens
from schemas.message import decode
from schemas.router_report import RouterReport, RoutingTotals
from tests.flow.stack import Stack, stack, start_worker, until_ready

PREFIX = list(range(100, 260))


async def totals_when(here: Stack, claim: Callable[[RoutingTotals], bool]) -> RoutingTotals:
    """Return the router's totals once they are as claimed."""
    found: asyncio.Future[RoutingTotals] = asyncio.get_running_loop().create_future()

    def hear(subject: str, payload: bytes) -> None:
        for totals in decode(payload, RouterReport).totals:
            if claim(totals) and not found.done():
                found.set_result(totals)

    listening = await here.bus.listen(here.bus.subjects.all_router_reports, hear)
    async with asyncio.timeout(10.0):
        totals = await found
    await listening.stop()
    return totals


async def test_a_request_of_higher_priority_overtakes_those_that_wait(nats_server: NatsServer, tmp_path: Path) -> None:
    engine_args = {"max_batched_tokens": "64", "pause_dir": str(tmp_path)}
    async with stack(nats_server, "b0", policy="kv", engine_args=engine_args) as here:
        order: list[str] = []

        async def ask(name: str, first: int, priority: int) -> None:
            def note(frame: Frame) -> bool:
                if isinstance(frame, Tokens) and name not in order:
                    order.append(name)
                return False

            prompt = [first, *range(200, 263)]
            await here.generate(prompt, max_tokens=1, priority=priority, on_frame=note)

        pause = tmp_path / "before_prefill.pause"
        pause.touch()
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for number, (name, priority) in enumerate((("under way", 0), ("low", 0), ("lower", -1), ("high", 1))):
                tasks.create_task(ask(name, 100 + number, priority))
                waiting = number + 1
                await here.until(lambda waiting=waiting: _held(here, "b0") == waiting)  # type: ignore[misc]
            pause.unlink()
        assert order == ["under way", "high", "low", "lower"]


def _held(here: Stack, name: str) -> int:
    load = here[name].load()
    return load.running + load.waiting


async def test_a_router_accounts_for_hits_savings_and_errors(nats_server: NatsServer) -> None:
    async with stack(nats_server, "p0", "d0", policy="kv") as here:
        for end in range(4):
            await here.generate([*PREFIX, 300 + end], max_tokens=2)
            await here.reported_idle("p0")
        await here.generate([*PREFIX, 300], max_tokens=2, cache_salt="tenant")
        totals = await totals_when(here, lambda totals: totals.num_prompts == 5)
        assert (totals.num_prompt_tokens, totals.num_cached_tokens) == (5 * 161, 3 * 160)
        assert (totals.num_missed_tokens, totals.bypasses, totals.refusals) == (0, {}, {})
        # The first prompt had no estimate; each later one's result was held against its own.
        totals = await totals_when(here, lambda totals: totals.num_estimates == 4)
        assert sum(totals.error_counts) == 4
        assert totals.error_sum_s >= abs(totals.estimated_s - totals.actual_s) - 1e-9
        load = here["p0"].load()
        assert load.num_cached_tokens == totals.num_cached_tokens


async def test_a_session_stays_on_one_worker_whatever_its_prompts(nats_server: NatsServer) -> None:
    async with stack(nats_server, "p0", "p1", "p2", "d0", policy="kv", num_routers=2) as here:
        for session in ("alice", "bob"):
            served = {
                (await here.generate([100 + turn, 101, 102 + turn], max_tokens=2, session=session)).prefilled_by
                for turn in range(6)
            }
            assert len(served) == 1


async def test_decode_stays_in_the_zone_of_its_prefill_worker(nats_server: NatsServer) -> None:
    async with stack(nats_server, policy="kv") as here, asyncio.TaskGroup() as tasks:
        for name, zone in (("p0", "a"), ("d0", "b"), ("d1", "a"), ("d2", "c")):
            start_worker(here, tasks, name, labels={"zone": zone})
        await until_ready(here)
        assert {record.labels["zone"] for record in here.fleet.workers.values()} == {"a", "b", "c"}
        for number in range(4):
            outcome = await here.generate([100 + number, 7, 8], max_tokens=2)
            assert (outcome.prefilled_by, outcome.decoded_by) == ("p0", "d1")
            await here.all_free()
            await here.reported_idle("d1")
        for member in here.members.values():
            member.stop.set()
