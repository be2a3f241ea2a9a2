"""The tasks of an engine, born in the one TaskGroup of its run: a handoff's fault is not the engine's death."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

_log = logging.getLogger(__name__)

HOUSEKEEPING_S = 60.0

Spawn = Callable[[Coroutine[object, object, None], str], "asyncio.Task[None]"]


def spawner(tasks: asyncio.TaskGroup) -> Spawn:
    """Return how legs start tasks in this group: a fault of ours in one costs its handoff, not the engine."""

    def spawn(coroutine: Coroutine[object, object, None], name: str) -> "asyncio.Task[None]":
        task = tasks.create_task(_logged(coroutine, name), name=name)
        task.add_done_callback(lambda _: coroutine.close())  # one cancelled before it began was never awaited
        return task

    return spawn


@contextmanager
def housekeeping(tasks: asyncio.TaskGroup, forget: Callable[[float], None], name: str) -> Iterator[None]:
    """Call `forget` with the monotonic time once a minute, until the block ends."""
    task = tasks.create_task(_now_and_then(forget), name=name)
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def one_error() -> AsyncIterator[None]:
    """Raise the one error of a task group as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


async def _logged(coroutine: Coroutine[object, object, None], name: str) -> None:
    try:
        await coroutine
    except Exception:
        _log.exception("the task %s failed", name)


async def _now_and_then(forget: Callable[[float], None]) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        forget(time.monotonic())
