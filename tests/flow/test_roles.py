"""A running worker in another role: what it holds ends first, the fleet sees one worker throughout, and it may be told
to leave meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bus.server import NatsServer
from schemas.errors import CapacityError, RequestError, UnavailableError
from schemas.frames import Tokens
from schemas.hop import AcceptedHop, ChangeRole
from schemas.ids import WorkerId
from schemas.worker import Role
from services.config import HandoffMode
from services.engines.paged.engine import PagedEngine
from services.engines.protocol import EngineProfile
from services.engines.sim.runner import SimRunner
from services.kv.shm import ShmTransfer
from tests.flow.stack import Outcome, Stack, stack, start_worker, until_ready

HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]
STEADY = {"decode_ms_per_step": "4"}


async def change_role(here: Stack, name: str, role: Role, grace_s: float | None = None) -> AcceptedHop:
    subject = here.bus.subjects.admin(name, "role")
    return await here.bus.ask(subject, ChangeRole(role=role, grace_s=grace_s), AcceptedHop, timeout_s=20.0)


async def streaming(here: Stack, tasks: asyncio.TaskGroup, max_tokens: int) -> "asyncio.Task[Outcome]":
    """Start a request and return once its first token has come."""
    has_begun = asyncio.Event()

    def seen(frame: object) -> bool:
        if isinstance(frame, Tokens):
            has_begun.set()
        return False

    task = tasks.create_task(here.generate([5, 6, 7], max_tokens, on_frame=seen))
    await has_begun.wait()
    return task


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_pair_swaps_its_roles(server: NatsServer, handoff: HandoffMode) -> None:
    async with stack(server, "p1", "p2", "d1", handoff=handoff) as here:
        expected = (await here.generate([5, 6, 7], 6)).ids
        engine, epoch = here["p1"].engine, here.fleet.workers[WorkerId("p1")].epoch
        assert (await change_role(here, "p1", "decode")).by == "p1"
        await change_role(here, "d1", "prefill")
        await here.until(lambda: here.fleet.workers[WorkerId("d1")].role == "prefill")
        outcomes = [await here.generate([5, 6, 7], 6) for _ in range(4)]
        assert [outcome.ids for outcome in outcomes] == [expected] * 4
        assert {outcome.decoded_by for outcome in outcomes} == {"p1"}
        assert {outcome.prefilled_by for outcome in outcomes} <= {"d1", "p2"}
        assert all(outcome.finished.usage.num_computed_prompt_tokens == 0 for outcome in outcomes)
        assert here["p1"].engine is engine
        assert here.fleet.workers[WorkerId("p1")].epoch == epoch
        await here.until(lambda: sum("p1" in key for key in here.fleet.all_records) == 1)
        await here.all_free()


async def test_streams_end_before_the_role_changes(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", engine_args=STEADY) as here, asyncio.TaskGroup() as tasks:
        stream = await streaming(here, tasks, 80)
        await change_role(here, "d1", "prefill")
        assert stream.done() or (await stream)
        assert len(stream.result().ids) == 80


async def test_streams_that_outlast_the_grace_go_on_elsewhere(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", "d2", engine_args=STEADY) as here, asyncio.TaskGroup() as tasks:
        expected = (await here.generate([5, 6, 7], 400)).ids
        stream = await streaming(here, tasks, 400)
        holder = next(name for name in ("d1", "d2") if here[name].load().running)
        await change_role(here, holder, "prefill", grace_s=0.1)
        outcome = await stream
        assert outcome.ids == expected
        assert outcome.finished.usage.num_resubmits == 1
        assert here.fleet.workers[WorkerId(holder)].role == "prefill"


async def test_a_worker_told_to_leave_while_it_changes_its_role_leaves(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", engine_args=STEADY) as here, asyncio.TaskGroup() as tasks:
        stream = await streaming(here, tasks, 150)
        change = tasks.create_task(_error_of(lambda: change_role(here, "d1", "prefill")))
        await here.until(lambda: here.fleet.workers[WorkerId("d1")].state == "draining")
        assert isinstance(await _error_of(lambda: change_role(here, "d1", "both")), CapacityError)
        here["d1"].stop.set()
        assert isinstance(await change, UnavailableError)
        assert len((await stream).ids) == 150
        await here.until(here["d1"].task.done)


async def test_the_role_that_it_has_already_costs_nothing(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", engine_args=STEADY) as here, asyncio.TaskGroup() as tasks:
        stream = await streaming(here, tasks, 100)
        await change_role(here, "d1", "decode")
        assert not stream.done()


class FixedEngine(PagedEngine):
    """One that was started for one role and can't take another, as those of other backends are."""

    async def run(self, *, ready: Callable[[EngineProfile], None], **rest: Any) -> None:
        await super().run(ready=lambda it: ready(msgspec.structs.replace(it, can_change_role=False)), **rest)


async def test_an_engine_that_cant_change_says_so(server: NatsServer) -> None:
    async with stack(server) as here, asyncio.TaskGroup() as tasks:
        member = start_worker(here, tasks, "b1", engine=FixedEngine(SimRunner({}), ShmTransfer()))
        await until_ready(here)
        error = await _error_of(lambda: change_role(here, "b1", "decode"))
        assert isinstance(error, RequestError)
        assert len((await here.generate([5, 6, 7], 3)).ids) == 3
        member.stop.set()


async def _error_of(ask: Callable[[], Any]) -> Exception | None:
    try:
        await ask()
    except Exception as error:
        return error
    return None
