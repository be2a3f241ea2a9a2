"""A cancellation that meets nats-py's answer in the same turn of the loop must not be lost."""

import asyncio

import pytest

from bus.scope import open_scope, raise_if_cancelled


async def test_a_loop_around_wait_for_ends_though_its_cancellation_was_dropped() -> None:
    """Python 3.11's wait_for returns the result and forgets the cancellation: the case, and its cure."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns = 0

    async def forever() -> None:
        nonlocal turns
        while True:
            await asyncio.wait_for(asyncio.shield(answer), 10.0)
            turns += 1
            raise_if_cancelled()

    async with asyncio.timeout(2.0):
        async with open_scope() as scope:
            task = scope.spawn(forever(), "loop")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            answer.set_result(None)
            task.cancel()
    assert task.cancelled()
    assert turns <= 1


async def test_nothing_is_raised_in_a_task_that_nobody_cancelled() -> None:
    raise_if_cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(1.0)
    raise_if_cancelled()
