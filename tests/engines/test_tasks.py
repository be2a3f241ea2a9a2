"""The tasks of an engine: a handoff's fault is not the engine's death."""

import asyncio
import gc
import warnings

import pytest

from services.engines import tasks as engine_tasks
from services.engines.tasks import housekeeping, one_error, spawner
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_handoffs_fault_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("a fault of ours")

    async def goes_on() -> None:
        await asyncio.sleep(0.01)
        done.set()

    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        spawn = spawner(group)
        spawn(goes_on(), "the other")
        spawn(fails(), "meet 17")
    assert done.is_set()
    assert "the task meet 17 failed" in caplog.text
    assert "a fault of ours" in caplog.text


async def test_a_task_cancelled_before_it_began_is_no_warning() -> None:
    async def never() -> None:
        pytest.fail("it began")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with asyncio.TaskGroup() as group:
            spawner(group)(never(), "never").cancel()
        gc.collect()
    assert warned == []


async def test_one_error_of_a_group_comes_out_as_itself() -> None:
    with pytest.raises(ValueError, match="alone"):
        async with one_error(), asyncio.TaskGroup():
            raise ValueError("alone")


async def test_of_several_errors_none_is_lost() -> None:
    async def fails() -> None:
        raise KeyError("beside")

    async def run() -> None:
        async with one_error(), asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(0)
            raise ValueError("within")

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert {type(error) for error in raised.value.exceptions} == {KeyError, ValueError}


async def test_housekeeping_goes_on_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_tasks, "HOUSEKEEPING_S", 0.001)
    times: list[float] = []
    async with asyncio.TaskGroup() as group:
        with housekeeping(group, times.append, "housekeeping"):
            await wait_until(lambda: len(times) >= 3)
    assert times == sorted(times)
    assert times[-1] > 0
    count = len(times)
    await asyncio.sleep(0.01)
    assert len(times) == count
