"""One stack of processes for each handoff, shared by all tests here: what one test breaks the next one mends."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.config import HandoffMode
from tests.faults.stack import Stack, run_stack

QUICK = {"test_decode_dies.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Waiting for deaths to be noticed takes minutes in all: `make test` runs a part, `make slow` and CI the rest."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=["pull", "rendezvous"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A stack whose workers hand over as the parameter says."""
    handoff: HandoffMode = request.param
    ready: asyncio.Future[Stack] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()

    async def keep() -> None:
        async with run_stack(handoff) as running:
            ready.set_result(running)
            await is_over.wait()

    # pytest-asyncio runs the two halves of a fixture in different tasks; the stack's task groups need one for both.
    keeper = asyncio.get_running_loop().create_task(keep())
    await asyncio.wait({ready, keeper}, return_when=asyncio.FIRST_COMPLETED)
    if keeper.done():
        keeper.result()
    yield ready.result()
    is_over.set()
    await keeper
