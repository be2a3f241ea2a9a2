"""What every test may use: a real nats-server per module, connections to it, and the leak check."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bus.connection import Bus
from bus.server import NatsServer

BusFactory = Callable[..., AbstractAsyncContextManager[Bus]]

_numbers = itertools.count(1)
LEAK_GRACE_S = 1.0


@pytest.fixture(scope="module")
def nats_server() -> Iterator[NatsServer]:
    """A secured nats-server of this module's own. Tests that stop or kill it make theirs: `async with NatsServer()`."""
    server = NatsServer()
    asyncio.run(server.__aenter__())
    yield server
    asyncio.run(server.__aexit__(None, None, None))


@pytest.fixture
def bus_factory(nats_server: NatsServer) -> BusFactory:
    """`async with bus_factory() as bus`: an internal connection with a client id of its own; `url=` for another."""

    def connect(client_id: str = "", *, url: str = "", **kwargs: Any) -> AbstractAsyncContextManager[Bus]:
        client_id = client_id or f"test{next(_numbers)}"
        return Bus.connect(url or nats_server.internal_url, name=client_id, client_id=client_id, **kwargs)

    return connect


@pytest_asyncio.fixture
async def no_leaks() -> AsyncIterator[None]:
    """Fail the test if asyncio tasks that it started outlive it: `pytestmark = pytest.mark.usefixtures("no_leaks")`."""
    before = asyncio.all_tasks()
    yield
    await wait_until(lambda: not _new_tasks(before), LEAK_GRACE_S, lambda: f"tasks left: {_new_tasks(before)}")


def _new_tasks(before: set["asyncio.Task[Any]"]) -> list["asyncio.Task[Any]"]:
    return [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]


async def wait_until(
    condition: Callable[[], bool], timeout_s: float = 5.0, explain: Callable[[], str] = lambda: "condition not met"
) -> None:
    """Return once a condition holds; fails the test with `explain()` when it doesn't within `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(explain())
        await asyncio.sleep(0.005)


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    """Stop a process (SIGSTOP) for the length of the block; all of its threads stand still at its start."""
    threads = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        states = [(thread / "stat").read_text().rsplit(")", 1)[1].split()[0] for thread in threads.iterdir()]
        return set(states) == {"T"}

    os.kill(pid, signal.SIGSTOP)
    try:
        await wait_until(is_stopped)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
