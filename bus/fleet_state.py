"""Who is in the fleet: records say what a service is, heartbeats that it lives. Pure: `now` is monotonic seconds.

- Live: a record, and a heartbeat of the same epoch that isn't older than DEAD_AFTER_S since the line was restored.
- While the line to NATS is down nobody is judged. A record that is missing from a snapshot or has expired is kept as
  long as its service beats: the KV may be the one that failed (a memory bucket is gone after a restart).
- Of one id the highest epoch wins; within it the newest record.
- Busy without progress for STALLED_AFTER_S is not live.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from schemas.worker import Heartbeat, Record, RuntimeConfig

ChangeKind = Literal["joined", "changed", "left"]
DEAD_AFTER_S = 2.0
STALLED_AFTER_S = 30.0
FORGET_BEAT_AFTER_S = 60.0


class Ident(NamedTuple):
    """A service instance: "worker" | "router" | "gateway", and its id."""

    service: str
    id: str


class Change(NamedTuple):
    kind: ChangeKind
    record: Record


class _Known(NamedTuple):
    record: Record
    order: int  # of arrival: revisions begin anew with a new bucket
    is_backed: bool


class _Beat(NamedTuple):
    heartbeat: Heartbeat
    seen_at: float
    progress_at: float


def ident_of(record: Record) -> Ident:
    """Return whom a record is about."""
    if isinstance(record, RuntimeConfig):
        return Ident("worker", record.worker_id)
    return Ident(record.service, record.id)


class FleetState:
    """Events in, changes out. Every method returns the changes that the event made to `live`."""

    def __init__(self) -> None:
        self.live: dict[Ident, Record] = {}
        self._known: dict[str, _Known] = {}
        self._keys: dict[Ident, set[str]] = {}
        self._beats: dict[Ident, _Beat] = {}
        self._is_line_up = True
        self._restored_at = float("-inf")
        self._order = 0

    @property
    def records(self) -> dict[str, Record]:
        """All records by key, live or not."""
        return {key: known.record for key, known in self._known.items()}

    @property
    def is_all_live(self) -> bool:
        """Whether every service that has a record is live."""
        return self._keys.keys() <= self.live.keys()

    def heartbeat_of(self, ident: Ident) -> Heartbeat | None:
        """Return the last heartbeat heard of a service."""
        beat = self._beats.get(ident)
        return beat.heartbeat if beat else None

    def put(self, key: str, record: Record, now: float) -> list[Change]:
        """A record was written."""
        self._order += 1
        changes: list[Change] = []
        before = self._known.get(key)
        if before is not None and ident_of(before.record) != ident_of(record):
            changes += self.delete(key, now)  # an intruder's or an operator's doing: the key is somebody else's now
        self._known[key] = _Known(record, self._order, is_backed=True)
        self._keys.setdefault(ident_of(record), set()).add(key)
        return changes + self._judge(ident_of(record), now)

    def delete(self, key: str, now: float) -> list[Change]:
        """A record was deleted by its owner."""
        known = self._known.pop(key, None)
        if known is None:
            return []
        ident = ident_of(known.record)
        self._keys[ident].discard(key)
        if not self._keys[ident]:
            del self._keys[ident]
        return self._judge(ident, now)

    def expire(self, key: str, now: float) -> list[Change]:
        """A record has expired."""
        known = self._known.get(key)
        if known is None:
            return []
        self._known[key] = known._replace(is_backed=False)
        return self._drop_unbacked(now)

    def snapshot(self, keys: set[str], now: float) -> list[Change]:
        """These are all the keys there are (their records have been put before)."""
        for key, known in self._known.items():
            if key not in keys:
                self._known[key] = known._replace(is_backed=False)
        return self._drop_unbacked(now)

    def beat(self, service: str, heartbeat: Heartbeat, now: float) -> list[Change]:
        """A heartbeat was heard; those of an epoch that has been succeeded don't count."""
        ident = Ident(service, heartbeat.id)
        last = self._beats.get(ident)
        if last is not None and heartbeat.epoch < last.heartbeat.epoch:
            return []
        progress_at = now
        if last is not None and heartbeat.is_busy and _mark(heartbeat) == _mark(last.heartbeat):
            progress_at = last.progress_at
        self._beats[ident] = _Beat(heartbeat, now, progress_at)
        live = self.live.get(ident)
        if live is not None and live.epoch == heartbeat.epoch and not heartbeat.is_leaving:
            return []  # nearly all beats: they keep alive and change nothing
        return self._judge(ident, now)

    def line_down(self) -> None:
        """Nothing can be heard: judge nobody."""
        self._is_line_up = False

    def line_up(self, now: float) -> None:
        """Everyone has DEAD_AFTER_S from now to be heard again."""
        self._is_line_up = True
        self._restored_at = now

    def tick(self, now: float) -> list[Change]:
        """Judge everyone; to be called a few times a second."""
        if not self._is_line_up:
            return []
        changes = [change for ident in list(self.live) for change in self._judge(ident, now)]
        changes += self._drop_unbacked(now)
        for ident, beat in list(self._beats.items()):
            if ident not in self.live and now - beat.seen_at > FORGET_BEAT_AFTER_S:
                del self._beats[ident]
        return changes

    def _judge(self, ident: Ident, now: float) -> list[Change]:
        before = self.live.get(ident)
        after = self._live_record(ident, now)
        if after == before:
            return []
        changes = []
        if after is None:
            del self.live[ident]
        else:
            self.live[ident] = after
        if before is not None and (after is None or after.epoch != before.epoch):
            changes.append(Change("left", before))
        if after is not None:
            is_same = before is not None and before.epoch == after.epoch
            changes.append(Change("changed" if is_same else "joined", after))
        return changes

    def _live_record(self, ident: Ident, now: float) -> Record | None:
        best = max(self._known_of(ident), key=lambda known: (known.record.epoch, known.order), default=None)
        if best is None:
            return None
        return best.record if self._is_beating(ident, best.record, now) else None

    def _known_of(self, ident: Ident) -> Iterator[_Known]:
        return (self._known[key] for key in self._keys.get(ident, ()))

    def _is_beating(self, ident: Ident, record: Record, now: float) -> bool:
        beat = self._beats.get(ident)
        if beat is None or beat.heartbeat.epoch != record.epoch or beat.heartbeat.is_leaving:
            return False
        if not self._is_line_up:
            return True
        is_heard = now - max(beat.seen_at, self._restored_at) <= DEAD_AFTER_S
        is_stalled = beat.heartbeat.is_busy and now - max(beat.progress_at, self._restored_at) > STALLED_AFTER_S
        return is_heard and not is_stalled

    def _drop_unbacked(self, now: float) -> list[Change]:
        changes: list[Change] = []
        for key, known in list(self._known.items()):
            if known.is_backed:
                continue
            ident = ident_of(known.record)
            is_replaced = any(other.is_backed for other in self._known_of(ident))
            if is_replaced or not self._is_beating(ident, known.record, now):
                changes += self.delete(key, now)
        return changes


def _mark(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.epoch, heartbeat.progress
