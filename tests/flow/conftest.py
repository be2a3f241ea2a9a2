"""One nats-server a module."""

from collections.abc import AsyncIterator

import pytest

from bus.server import NatsServer


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as running:
        yield running
