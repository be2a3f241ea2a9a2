"""What routers hear of a TensorRT-LLM engine's prefix cache."""

import numpy as np

from schemas.kv_events import KvChange, KvCleared, KvRemoved, KvStored
from services.engines.protocol import CacheChanged
from services.engines.trtllm.kv_events import KvEventBook
from services.prefix_hash import block_hashes, root_hash
from tests.engines.paged.fleet import decode_leg, prompt, request_for
from tests.engines.trtllm.scene import Scene, seated


def block(block_hash, tokens, **more):
    return {"block_hash": block_hash, "tokens": [{"token_id": one} for one in tokens], **more}


def stored(event_id, blocks, parent_hash=None, **more):
    data = {"type": "stored", "parent_hash": parent_hash, "blocks": blocks}
    return {"event_id": event_id, "window_size": 99, "data": data, **more}


def removed(event_id, *block_hashes, **more):
    return {"event_id": event_id, "window_size": 99, "data": {"type": "removed", "block_hashes": block_hashes}, **more}


def names(token_ids, salt=""):
    return block_hashes(token_ids, 2, salt)


def test_blocks_get_the_names_of_their_prefix():
    book = KvEventBook(2)
    chained = names([1, 2, 3, 4, 5, 6])
    assert book.take(stored(7, [block(2**64 - 1, [1, 2]), block(5, [3, 4])])) == (
        KvStored(parent=root_hash(""), blocks=chained[:2].tobytes()),
    )
    assert book.take(stored(8, [block(6, [5, 6]), block(9, [7])], parent_hash=5)) == (
        KvStored(parent=int(chained[1]), blocks=chained[2:].tobytes()),
    )
    assert book.take(removed(9, 5, 9, 1234)) == (KvRemoved(blocks=chained[1:2].tobytes()),)


def test_salts_separate_and_what_tokens_dont_name_isnt_told():
    book = KvEventBook(2)
    (change,) = book.take(stored(1, [block(1, [1, 2], cache_salt="s")]))
    assert change == KvStored(parent=root_hash("s"), blocks=names([1, 2], "s").tobytes())
    assert book.take(stored(2, [block(2, [1, 2], mm_keys=["m"]), block(3, [3, 4])])) == ()
    assert book.take(stored(3, [block(4, [5, 6])], parent_hash=3)) == ()
    assert book.take(stored(4, [block(5, [5, 6], lora_name="l")])) == ()
    assert book.take({**stored(5, [block(6, [5, 6])]), "window_size": 10}) == ()
    assert book.take({"event_id": 6, "window_size": 99, "data": {"type": "updated", "block_hash": 1}}) == ()


def test_a_name_is_gone_when_every_rank_has_dropped_it():
    book = KvEventBook(2)
    assert len(book.take(stored(1, [block(1, [1, 2])], attention_dp_rank=0))) == 1
    assert book.take(stored(1, [block(1, [1, 2])], attention_dp_rank=1)) == ()
    assert book.take(stored(2, [block(1, [1, 2])], attention_dp_rank=1)) == ()
    assert book.take(removed(2, 1, attention_dp_rank=0)) == ()
    assert len(book.take(removed(3, 1, attention_dp_rank=1))) == 1


def test_after_a_gap_everything_is_forgotten():
    book = KvEventBook(2)
    book.take(stored(1, [block(1, [1, 2])]))
    cleared, again = book.take(stored(3, [block(1, [1, 2])]))
    assert (cleared, type(again)) == (KvCleared(), KvStored)
    assert book.take(stored(4, [block(2, [3, 4])], parent_hash=77)) == ()


async def test_the_engines_cache_is_told_as_it_grows_and_shrinks():
    args = {"kv_cache_config": '{"event_buffer_max_size": 100}'}
    async with seated(Scene(), "both", engine_args=args) as seat:

        def changes() -> list[KvChange]:
            told = [one for one in seat.host.events.get("", []) if isinstance(one, CacheChanged)]
            return [change for one in told for change in one.changes]

        request = request_for(prompt(10), max_tokens=2)
        longer = request_for(prompt(21), max_tokens=2)
        for one in (request, longer):
            seat.engine.decode(decode_leg(one))
            await seat.host.output(one.attempt_id)
        await seat.host.until(lambda: len(changes()) == 2)
        expected = block_hashes(prompt(21), 4)
        first, second = changes()
        assert isinstance(first, KvStored)
        assert isinstance(second, KvStored)
        assert np.frombuffer(first.blocks + second.blocks, np.uint64).tolist() == expected.tolist()
        assert (first.parent, second.parent) == (root_hash(""), int(expected[1]))
        seat.executor.evict()
        await seat.host.until(lambda: len(changes()) == 3)
        last = changes()[-1]
        assert isinstance(last, KvRemoved)
        assert {*np.frombuffer(last.blocks, np.uint64).tolist()} == {*expected.tolist()}
