"""A task group whose tasks end with its block: background work that has no end of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


class Scope:
    """Spawns tasks of one block; made by `open_scope`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task; its exception ends the block."""
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel every task that still runs."""
        for task in self._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def open_scope() -> AsyncIterator[Scope]:
    """Run a block with tasks beside it: a task's exception cancels the block, the block's end cancels the tasks.

    One exception comes out as it is; only several at once come as an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as group:
            scope = Scope(group)
            try:
                yield scope
            finally:
                scope.cancel()
    except BaseExceptionGroup as group_error:
        if len(group_error.exceptions) == 1:
            raise group_error.exceptions[0] from None
        raise


def raise_if_cancelled() -> None:
    """Raise the CancelledError that this task is owed: call it after awaiting nats-py, wherever it matters.

    Python 3.11's asyncio.wait_for, which nats-py's request rests on, returns the result and drops a cancellation that
    comes in the same turn of the loop (bpo-37658); a loop around it would then run for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
