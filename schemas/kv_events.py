"""What a worker tells routers of its KV cache, on `events.kv.{model}.{worker_id}`, and the snapshot that heals a gap.

Blocks travel as their names: XXH3-64 hashes chained over token ids and salt (services/prefix_hash.py), eight bytes
each, little-endian, one after the other. Names say nothing of the tokens to whoever doesn't have them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.ids import Epoch, WorkerId
from schemas.message import Message

BlockNames = bytes


class KvStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """These blocks hold KV now; each follows the one before it, the first follows `parent` (a prompt's first block:
    the hash of its salt)."""

    parent: Annotated[int, Meta(ge=0)]
    blocks: BlockNames


class KvRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """These blocks' KV is gone."""

    blocks: BlockNames


class KvCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """Every block's KV is gone."""


KvChange = KvStored | KvRemoved | KvCleared


class KvEvents(Message, frozen=True, kw_only=True, tag="kv_events.v1"):
    """Changes in order. The first has id `first_id`, each further one the next: an epoch's ids begin at 1 and have no
    gaps, so that a missing one is a message lost."""

    worker_id: WorkerId
    epoch: Epoch
    first_id: Annotated[int, Meta(ge=1)]
    changes: tuple[KvChange, ...]


class KvSnapshotRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="kv_snapshot_request.v1"):
    """Ask a worker, on `peer.{worker_id}.kv_snapshot`, for the blocks whose name modulo `num_parts` is `part`."""

    part: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    num_parts: Annotated[int, Meta(ge=1, lt=2**31)] = 1


class KvSnapshot(Message, frozen=True, kw_only=True, omit_defaults=True, tag="kv_snapshot.v1"):
    """All blocks of that part after the event `last_id`. `num_parts` larger than asked for: too many for one message,
    ask again in so many parts (`blocks` is empty then)."""

    worker_id: WorkerId
    epoch: Epoch
    last_id: int
    blocks: BlockNames
    num_parts: int = 1
