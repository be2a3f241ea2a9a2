"""From KV events to index updates: in order, without gaps, and anew where something was missed. Pure.

A worker's state is known, or asked for. While a snapshot is on its way the worker's events are kept; once it is there
the index takes the snapshot and then those events it doesn't cover. Lost events show as a gap in the ids, or, when
nothing comes after them, in a load report that knows of a later id.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from schemas.ids import Epoch, WorkerId
from schemas.kv_events import BlockNames, KvChange, KvEvents, KvRemoved, KvSnapshot, KvStored
from services.prefix_hash import BlockHashes
from services.router.prefix_index import PrefixIndex

MAX_KEPT_CHANGES = 20_000
"""Of one worker, while a snapshot is awaited; beyond, another snapshot is cheaper."""


class _Followed(msgspec.Struct):
    """`next_id`: of the next change expected; `kept`: messages that wait for a snapshot, None when none is awaited."""

    epoch: Epoch
    index: PrefixIndex
    next_id: int = 1
    kept: list[KvEvents] | None = msgspec.field(default_factory=list)
    parts: dict[int, KvSnapshot] = {}


class KvFeed:
    """The workers whose events are followed. `num_gaps` counts snapshots that had to be asked for beside the first."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self._followed: dict[WorkerId, _Followed] = {}

    def follow(self, worker: WorkerId, epoch: Epoch, index: PrefixIndex) -> None:
        """A worker joined, or began a new epoch: what it holds is to be asked for. Idempotent."""
        known = self._followed.get(worker)
        if known is None or known.epoch < epoch or known.index is not index:
            if known is not None:
                known.index.cleared(worker)
            self._followed[worker] = _Followed(epoch=epoch, index=index)

    def forget(self, worker: WorkerId) -> None:
        """The worker left."""
        known = self._followed.pop(worker, None)
        if known is not None:
            known.index.forget(worker)

    def missing(self) -> list[WorkerId]:
        """Return the workers whose snapshot is wanted."""
        return [worker for worker, one in self._followed.items() if one.kept is not None]

    def on_events(self, events: KvEvents) -> None:
        """Take a message of changes."""
        one = self._followed.get(events.worker_id)
        if one is None or events.epoch != one.epoch:
            return
        if one.kept is not None:
            one.kept.append(events)
            if sum(len(kept.changes) for kept in one.kept) > MAX_KEPT_CHANGES:
                one.kept.clear()
                one.parts.clear()
        elif events.first_id > one.next_id:
            self._lost(one, [events])
        else:
            _apply(one, events)

    def on_last_id(self, worker: WorkerId, epoch: Epoch, last_id: int) -> None:
        """The worker says that it has published changes up to this id; what it published before has come, or won't."""
        one = self._followed.get(worker)
        if one is not None and one.epoch == epoch and one.kept is None and last_id >= one.next_id:
            self._lost(one, [])

    def on_snapshot(self, snapshot: KvSnapshot, part: int) -> bool:
        """Take a part of a snapshot; return whether the worker is known again. A part that doesn't fit those before
        it (another number of parts) begins anew."""
        one = self._followed.get(snapshot.worker_id)
        if one is None or one.kept is None or snapshot.epoch != one.epoch:
            return False
        if any(other.num_parts != snapshot.num_parts for other in one.parts.values()):
            one.parts.clear()
        one.parts[part] = snapshot
        if len(one.parts) < snapshot.num_parts:
            return False
        self._settle(snapshot.worker_id, one, one.kept)
        return one.kept is None

    def _settle(self, worker: WorkerId, one: _Followed, kept: list[KvEvents]) -> None:
        """Parts may be of different moments: changes after the earliest are applied to all, which changes nothing
        where a part has them already."""
        parts, one.parts = one.parts, {}
        one.index.cleared(worker)
        for part in parts.values():
            one.index.stored(worker, names_of(part.blocks))
        one.next_id = 1 + min(part.last_id for part in parts.values())
        last_id = max(part.last_id for part in parts.values())
        one.kept = None
        for events in kept:
            if events.first_id > one.next_id:
                self._lost(one, [later for later in kept if later.first_id >= events.first_id])
                return
            _apply(one, events)
        if one.next_id <= last_id:
            self._lost(one, [])

    def _lost(self, one: _Followed, kept: Iterable[KvEvents]) -> None:
        self.num_gaps += 1
        one.kept = list(kept)
        one.parts = {}


def names_of(blocks: BlockNames) -> BlockHashes:
    """Return the names of blocks as the wire has them; a trailing part of one is dropped."""
    whole = len(blocks) // 8 * 8
    return np.frombuffer(blocks[:whole], dtype="<u8").astype(np.uint64)


def _apply(one: _Followed, events: KvEvents) -> None:
    """Apply the changes not applied yet."""
    for change in events.changes[max(0, one.next_id - events.first_id) :]:
        _change(one.index, events.worker_id, change)
    one.next_id = max(one.next_id, events.first_id + len(events.changes))


def _change(index: PrefixIndex, worker: WorkerId, change: KvChange) -> None:
    match change:
        case KvStored():
            index.stored(worker, names_of(change.blocks))
        case KvRemoved():
            index.removed(worker, names_of(change.blocks))
        case _:
            index.cleared(worker)
