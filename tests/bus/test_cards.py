"""Model cards: published once, found whole, kept apart, there again after the server lost them."""

import asyncio
import random
import string

import nats
import pytest

from bus.cards import CardNotFoundError, fetch_card, keep_card, publish_card
from bus.connection import Bus
from bus.server import NatsServer
from schemas.errors import BusUnavailableError
from schemas.model_card import ModelCard
from tests.conftest import BusFactory, wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


def a_card(digest: str = "d1", num_bytes: int = 1000, model: str = "m") -> ModelCard:
    text = "".join(random.Random(digest).choices(string.ascii_letters, k=num_bytes))
    return ModelCard(model=model, digest=digest, tokenizer_json=text, eos_token_ids=(2,))


async def test_a_card_of_5_mb_is_fetched_as_it_was_published(bus_factory: BusFactory) -> None:
    async with bus_factory() as worker, bus_factory() as gateway:
        card = a_card("large", 5_000_000)
        await publish_card(worker, card)
        assert await fetch_card(gateway, "large") == card


async def test_workers_that_publish_at_once_do_one_another_no_harm(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, bus_factory() as other:
        card = a_card("shared", 2_000_000)
        async with asyncio.TaskGroup() as tasks:
            for publisher in (bus, other, bus, other):
                tasks.create_task(publish_card(publisher, card))
        assert await fetch_card(bus, "shared") == card


async def test_an_unknown_card_is_a_clear_error(bus_factory: BusFactory) -> None:
    async with bus_factory(namespace="fresh") as bus:
        with pytest.raises(CardNotFoundError, match="nowhere"):
            await fetch_card(bus, "nowhere")
        await publish_card(bus, a_card())
        with pytest.raises(CardNotFoundError, match="nowhere"):
            await fetch_card(bus, "nowhere")


async def test_a_damaged_card_is_refused(bus_factory: BusFactory, nats_server: NatsServer) -> None:
    async with bus_factory(namespace="damaged") as bus:
        await publish_card(bus, a_card())
        intruder = await nats.connect(nats_server.internal_url)
        bucket = await intruder.jetstream().key_value("damaged_cards")
        chunk = next(key for key in await bucket.keys() if key.endswith(".0"))
        await bucket.put(chunk, b"something else")
        await intruder.close()
        with pytest.raises(BusUnavailableError, match="damaged"):
            await fetch_card(bus, "d1")


async def test_a_card_is_published_again_when_the_server_has_lost_it() -> None:
    async with NatsServer() as server, Bus.connect(server.internal_url, name="w", client_id="w") as bus:
        await publish_card(bus, a_card())
        await bus.jetstream().delete_key_value(bus.subjects.cards_bucket)
        server.kill()
        await wait_until(lambda: not bus.is_connected)
        await server.start()
        await wait_until(lambda: bus.is_connected)
        async with asyncio.timeout(5):
            while True:
                try:
                    assert await fetch_card(bus, "d1") == a_card()
                    break
                except CardNotFoundError:
                    await asyncio.sleep(0.02)


async def test_a_card_comes_back_to_a_server_that_lost_it_under_a_connection_that_stays(
    bus_factory: BusFactory,
) -> None:
    async with bus_factory(namespace="lost") as worker, bus_factory(namespace="lost") as gateway:
        await publish_card(worker, a_card())
        keeping = worker.spawn(keep_card(worker, a_card(), check_every_s=0.05), "keep")
        await gateway.jetstream().delete_key_value("lost_cards")
        async with asyncio.timeout(5):
            while True:
                try:
                    assert await fetch_card(gateway, "d1") == a_card()
                    break
                except CardNotFoundError:
                    await asyncio.sleep(0.02)
        keeping.cancel()
