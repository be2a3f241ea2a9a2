"""An engine's thread and the event loop that waits for it."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from schemas.errors import EngineError
from services.engines.adapter.lifetime import Lifetime


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


async def test_a_thread_begins_with_what_the_engine_is_and_ends() -> None:
    life = Lifetime[str]("Engine")
    heard: list[tuple[int, str]] = []

    def work() -> None:
        life.tell(life.begin, "the spec")
        life.tell(lambda step: heard.append((threading.get_ident(), step)), "a step")
        life.tell(life.end)

    in_thread(work)
    assert await life.until_begun() == "the spec"
    await life.until_ended()
    assert heard == [(threading.get_ident(), "a step")], "told on the event loop's thread, before the end"


async def test_what_keeps_an_engine_from_starting_is_raised_and_ends_it() -> None:
    life = Lifetime[str]("Engine")
    in_thread(lambda: life.tell(life.end, ValueError("no such model")))
    with pytest.raises(ValueError, match="no such model"):
        await life.until_begun()
    with pytest.raises(ValueError, match="no such model"):
        await life.until_ended()


async def test_an_engine_that_dies_ends_with_its_first_error() -> None:
    life = Lifetime[str]("Engine")
    life.begin("the spec")
    life.end(ValueError("first"))
    life.end(ValueError("second"))
    life.end()
    assert await life.until_begun() == "the spec"
    with pytest.raises(ValueError, match="first"):
        await life.until_ended()


async def test_a_thread_that_exits_the_process_is_an_engine_that_ended() -> None:
    life = Lifetime[str]("Frobnicator")
    life.end(SystemExit(3))
    with pytest.raises(EngineError, match="Frobnicator ended with SystemExit: 3"):
        await life.until_begun()
    await life.ended_within(1.0)


async def test_who_gives_up_waiting_leaves_the_end_to_others() -> None:
    life = Lifetime[str]("Engine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await life.until_ended()
    await life.ended_within(0.01)
    life.end()
    await life.until_ended()


async def test_the_wait_for_an_end_with_an_error_raises_nothing() -> None:
    life = Lifetime[str]("Engine")
    life.begin("the spec")
    in_thread(lambda: life.tell(life.end, ValueError("died")))
    await life.ended_within(5.0)
    with pytest.raises(ValueError, match="died"):
        await life.until_ended()


def test_a_thread_that_outlives_the_event_loop_tells_nobody() -> None:
    async def make() -> Lifetime[str]:
        return Lifetime[str]("Engine")

    asyncio.run(make()).tell(pytest.fail, "nobody is there")
