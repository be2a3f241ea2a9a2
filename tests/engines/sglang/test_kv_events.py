"""What routers hear of an SGLang engine's prefix cache."""

import msgspec

from schemas.kv_events import KvCleared, KvRemoved, KvStored
from services.engines.sglang.kv_events import KvEventBook
from services.prefix_hash import block_hashes, root_hash


def batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(hashes: list[int], tokens: list[object], parent: int | None = None, **more: object) -> dict[str, object]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**event, "block_size": 2, "lora_id": None, "medium": "GPU", **more}


def removed(*hashes: int, medium: str = "GPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def names(token_ids: list[int], salt: str = "") -> bytes:
    return block_hashes(token_ids, 2, salt).tobytes()


def test_blocks_get_the_names_of_their_prefix() -> None:
    book = KvEventBook(2)
    assert book.take(0, batch(stored([-5, 6], [1, 2, 3, 4]))) == (
        KvStored(parent=root_hash(""), blocks=names([1, 2, 3, 4])),
    )
    (change,) = book.take(1, batch(stored([7], [5, 6], parent=6)))
    assert isinstance(change, KvStored)
    assert change.blocks == names([1, 2, 3, 4, 5, 6])[16:]
    assert book.take(2, batch(removed(-5, 99))) == (KvRemoved(blocks=names([1, 2])),)


def test_salts_separate() -> None:
    (change,) = KvEventBook(2).take(0, batch(stored([1], [1, 2], cache_salt="s")))
    assert change == KvStored(parent=root_hash("s"), blocks=names([1, 2], "s"))


def test_what_ids_and_salt_dont_name_isnt_told() -> None:
    book = KvEventBook(2)
    adapter = stored([1], [1, 2], lora_name="l")
    bigrams = stored([2], [[1, 2], [2, 3]])
    orphan = stored([3], [3, 4], parent=77)
    assert book.take(0, batch(adapter, bigrams, orphan, {"type": "Unheard"})) == ()


def test_a_name_is_gone_when_every_tier_has_dropped_it() -> None:
    book = KvEventBook(2)
    book.take(0, batch(stored([1], [1, 2])))
    assert book.take(1, batch(stored([1], [1, 2], medium="CPU_PINNED"), removed(1))) == ()
    assert book.take(2, batch(removed(1, medium="CPU_PINNED"))) == (KvRemoved(blocks=names([1, 2])),)


def test_after_a_gap_or_a_flush_everything_is_forgotten() -> None:
    book = KvEventBook(2)
    book.take(0, batch(stored([1], [1, 2])))
    cleared, again = book.take(2, batch(stored([1], [1, 2])))
    assert (cleared, type(again)) == (KvCleared(), KvStored)
    assert book.take(3, batch(stored([2], [3, 4], parent=1), {"type": "AllBlocksCleared"}))[-1] == KvCleared()
    assert book.num_blocks == 0


def test_a_first_batch_that_was_missed_is_a_gap() -> None:
    changes = KvEventBook(2).take(4, batch(stored([1], [1, 2])))
    assert changes[0] == KvCleared()
