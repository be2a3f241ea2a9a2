"""Model cards over JetStream, so that only workers need a model's files.

A card may be 5 MB and an external server's messages 1 MiB, so it is compressed and cut into chunks, keyed by content:
writers of the same card write the same bytes and can't harm one another. The index is written last. (nats-py's
object store replaces chunks under readers when two workers publish at once.)
"""

import asyncio
import contextlib
import hashlib
import logging
import random
import zlib

import msgspec
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import StorageType
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue

from bus.connection import Bus
from bus.patiently import patiently
from bus.scope import raise_if_cancelled
from bus.subjects import slug
from schemas.errors import BusUnavailableError, RequestError
from schemas.message import decode, encode
from schemas.model_card import ModelCard

logger = logging.getLogger(__name__)

CHUNK_BYTES = 512 * 1024
CHECK_EVERY_S = 15.0
_STREAM_EXISTS_CODE = 10058


class _CardIndex(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    num_chunks: int


class CardNotFoundError(BusUnavailableError):
    """Nobody has published this card (yet): its workers do so before they join."""


async def publish_card(bus: Bus, card: ModelCard) -> None:
    """Publish a card under its digest, once; again after a reconnect if the server has lost it.

    Raises BusUnavailableError when JetStream doesn't answer for long.
    """

    async def publish() -> None:
        await patiently(lambda: _put(bus, card))
        raise_if_cancelled()

    await publish()
    bus.on_reconnect(publish)


async def keep_card(bus: Bus, card: ModelCard, *, check_every_s: float = CHECK_EVERY_S) -> None:
    """Publish a card again whenever the server no longer has it, until cancelled: a store may be lost, or a bucket
    deleted, under connections that stay, and a gateway that starts afterwards would wait for the card in vain."""
    while True:
        await asyncio.sleep(check_every_s * random.uniform(0.5, 1.5))
        if bus.is_connected:
            with contextlib.suppress(BusUnavailableError):  # not now: the next look is soon
                await _put(bus, card)
        raise_if_cancelled()


async def fetch_card(bus: Bus, digest: str) -> ModelCard:
    """Return the card of a model digest. Its `model` is the first publisher's served name: two names of one model
    share a card. Raises CardNotFoundError, BusUnavailableError."""
    try:
        bucket = await bus.jetstream().key_value(bus.subjects.cards_bucket)
        index = decode(await _get(bucket, slug(digest)), _CardIndex)
        chunks = [await _get(bucket, f"{slug(digest)}.{index.content}.{number}") for number in range(index.num_chunks)]
    except (KeyNotFoundError, APIError) as error:
        raise CardNotFoundError(f"no card of model digest {digest}: {error}") from error
    except Error as error:
        raise BusUnavailableError(f"card {digest} not fetched: {error}") from error
    return await asyncio.to_thread(_unpack, chunks, index.content)


async def _put(bus: Bus, card: ModelCard) -> None:
    key = slug(card.digest)
    jetstream = bus.jetstream(timeout_s=5.0)
    try:
        if await _is_there(jetstream, bus.subjects.cards_bucket, key):
            return
        packed = await asyncio.to_thread(_pack, card)
        content = hashlib.sha256(packed).hexdigest()[:32]
        bucket = await _ensure_bucket(jetstream, bus.subjects.cards_bucket, bus.replicas)
        pieces = [packed[start : start + CHUNK_BYTES] for start in range(0, len(packed), CHUNK_BYTES)]
        for number, piece in enumerate(pieces):
            await bucket.put(f"{key}.{content}.{number}", piece)
        await bucket.put(key, encode(_CardIndex(content=content, num_chunks=len(pieces))))
    except Error as error:
        raise BusUnavailableError(f"card {card.digest} not published: {error}") from error


async def _ensure_bucket(jetstream: JetStreamContext, bucket: str, replicas: int) -> KeyValue:
    try:
        return await jetstream.create_key_value(bucket=bucket, history=1, storage=StorageType.FILE, replicas=replicas)
    except APIError as error:
        if error.err_code != _STREAM_EXISTS_CODE:
            raise
        return await jetstream.key_value(bucket)


async def _is_there(jetstream: JetStreamContext, bucket: str, key: str) -> bool:
    try:
        await (await jetstream.key_value(bucket)).get(key)
    except (BucketNotFoundError, KeyNotFoundError):
        return False
    return True


async def _get(bucket: KeyValue, key: str) -> bytes:
    entry = await bucket.get(key)
    return bytes(entry.value or b"")


def _pack(card: ModelCard) -> bytes:
    return zlib.compress(encode(card), 1)


def _unpack(chunks: list[bytes], content: str) -> ModelCard:
    packed = b"".join(chunks)
    if hashlib.sha256(packed).hexdigest()[:32] != content:
        raise BusUnavailableError("card is damaged: its bytes aren't those that were published")
    try:
        return decode(zlib.decompress(packed), ModelCard)
    except (zlib.error, RequestError) as error:
        raise BusUnavailableError(f"card can't be read: {error}") from error
