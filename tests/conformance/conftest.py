"""One pair of workers an engine, started at its first test and kept for all of them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bus.server import NatsServer
from tests.conformance.engines import EngineCase, params
from tests.conformance.pair import MODEL, Desk, Pair, desk_of
from tests.conformance.tiny_model import write_card, write_tiny_llama


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[NatsServer]:
    server = NatsServer()
    asyncio.run(server.__aenter__())
    yield server
    asyncio.run(server.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="session")
def card_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_card(tmp_path_factory.mktemp("card") / MODEL)


@pytest.fixture(scope="session", params=params())
def pair(
    request: pytest.FixtureRequest, conformance_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    case: EngineCase = request.param
    if why := case.why_not():
        pytest.skip(why)
    model = None if case.model == "none" else request.getfixturevalue(f"{case.model}_model")
    folder = tmp_path_factory.mktemp(case.name)
    for name in ("p", "d", "b"):
        (folder / name).mkdir()
    pair = Pair(case, conformance_server, model, folder)
    pair.ensure_alive()
    yield pair
    pair.stop()


@pytest_asyncio.fixture
async def desk(pair: Pair) -> AsyncIterator[Desk]:
    """A desk at a pair that is whole; after the test nothing may be held."""
    pair.ensure_alive()
    async with desk_of(pair) as desk:
        yield desk
        await desk.until_free(20.0)
