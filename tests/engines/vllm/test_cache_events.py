"""What routers hear of a vLLM engine's prefix cache; the conformance suite has a real engine's events."""

from typing import Any

import msgspec

from schemas.kv_events import KvCleared, KvRemoved, KvStored
from services.engines.vllm.cache_events import CacheEventBook
from services.prefix_hash import block_hashes, root_hash


class BlockStored(msgspec.Struct, kw_only=True):
    """The fields of vllm/distributed/kv_events.py@0.32.0 that are read."""

    block_hashes: list[bytes]
    token_ids: list[int]
    parent_block_hash: bytes | None = None
    block_size: int = 2
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, kw_only=True):
    block_hashes: list[bytes]
    medium: str | None = "GPU"
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct):
    pass


def names(token_ids: list[int], salt: str = "") -> bytes:
    return block_hashes(token_ids, 2, salt).tobytes()


def last_name(token_ids: list[int]) -> bytes:
    return names(token_ids)[-8:]


def test_blocks_get_the_names_of_their_prefix() -> None:
    book = CacheEventBook(2, lambda block_hash: False)
    first = BlockStored(block_hashes=[b"a", b"b"], token_ids=[1, 2, 3, 4])
    assert book.take([first]) == (KvStored(parent=root_hash(""), blocks=names([1, 2, 3, 4])),)
    more = BlockStored(block_hashes=[b"c"], token_ids=[5, 6], parent_block_hash=b"b")
    (change,) = book.take([more])
    assert change == KvStored(parent=int(block_hashes([1, 2, 3, 4], 2)[1]), blocks=last_name([1, 2, 3, 4, 5, 6]))
    gone = BlockRemoved(block_hashes=[b"b", b"unknown"])
    assert book.take([gone]) == (KvRemoved(blocks=last_name([1, 2, 3, 4])),)


def test_a_block_told_again_is_the_same_and_gone_when_the_engine_has_no_copy_left() -> None:
    cached = {b"a"}
    book = CacheEventBook(2, cached.__contains__)
    one = BlockStored(block_hashes=[b"a"], token_ids=[1, 2])
    assert len(book.take([one, one])) == 1
    assert book.take([one, BlockRemoved(block_hashes=[b"a"])]) == ()
    cached.clear()
    assert book.take([BlockRemoved(block_hashes=[b"a"])]) == (KvRemoved(blocks=names([1, 2])),)
    assert book.take([BlockRemoved(block_hashes=[b"a"])]) == ()


def test_a_salt_is_in_the_first_block_and_what_isnt_ours_isnt_told() -> None:
    book = CacheEventBook(2, lambda block_hash: False)
    salted = BlockStored(block_hashes=[b"a", b"b"], token_ids=[1, 2, 3, 4], extra_keys=[("s",), None])
    assert book.take([salted]) == (KvStored(parent=root_hash("s"), blocks=names([1, 2, 3, 4], "s")),)
    image = BlockStored(block_hashes=[b"c", b"d"], token_ids=[1, 2, 3, 4], extra_keys=[None, (("image", 0),)])
    assert book.take([image]) == (KvStored(parent=root_hash(""), blocks=names([1, 2])),)
    for other in (
        BlockStored(block_hashes=[b"e"], token_ids=[7, 8], lora_name="l", extra_keys=[("l",)]),
        BlockStored(block_hashes=[b"f"], token_ids=[7, 8], medium="CPU"),
        BlockStored(block_hashes=[b"g"], token_ids=[7, 8], group_idx=1),
        BlockStored(block_hashes=[b"h"], token_ids=[7, 8], parent_block_hash=b"unknown"),
        BlockRemoved(block_hashes=[b"a"], medium="CPU"),
    ):
        assert book.take([other]) == ()


def test_cleared_comes_between_what_was_before_and_after() -> None:
    book = CacheEventBook(2, lambda block_hash: False)
    one = BlockStored(block_hashes=[b"a"], token_ids=[1, 2])
    stored = KvStored(parent=root_hash(""), blocks=names([1, 2]))
    assert book.take([one, AllBlocksCleared(), one]) == (stored, KvCleared(), stored)
    assert book.take([BlockRemoved(block_hashes=[b"a"])]) == (KvRemoved(blocks=names([1, 2])),)
