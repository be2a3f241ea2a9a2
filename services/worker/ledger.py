"""Which attempts this worker holds, held, or was told to forget. Pure; Unix time comes from the caller.

An abort may overtake its request (they come on different subjects): ids aborted here are remembered, and a leg that
comes after its abort is refused.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import msgspec

from bus.deadlines import Due, Stage, next_due
from schemas.handoff import BootstrapInfo
from schemas.hop import DecodeRequest, Dispatch, PrefillRequest
from schemas.ids import AttemptId
from schemas.request import Deadlines
from services.log_context import RequestNames, names_of
from services.phase_timings import NO_TIMINGS
from services.worker.leg_clock import LegClock

MAX_REMEMBERED = 16384

Verdict = Literal["new", "duplicate", "elsewhere", "aborted", "full"]
"""`duplicate`: the same leg once more. `elsewhere`: the attempt is, or was, here by another router's dispatch."""


class Entry(msgspec.Struct, kw_only=True):
    """An attempt held. `result_subject` is "" for a decode leg, `bootstrap` the rendezvous that a prefill leg keeps;
    `next_seq` counts the tokens sent, resumed ones too."""

    attempt_id: AttemptId
    bootstrap: BootstrapInfo | None
    names: RequestNames
    clock: LegClock
    stream_subject: str
    result_subject: str
    owner: str
    deadlines: Deadlines
    stage: Stage
    next_seq: int
    last_token_at: float | None = None

    def due(self) -> Due | None:
        """Return the deadline that counts now."""
        return next_due(self.deadlines, self.stage, self.last_token_at)


class Recent:
    """The newest ids, a bounded number of them, each with the dispatch that it came by."""

    def __init__(self, max_ids: int = MAX_REMEMBERED) -> None:
        self._max_ids = max_ids
        self._ids: OrderedDict[AttemptId, Dispatch | None] = OrderedDict()

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._ids

    def dispatch_of(self, attempt_id: AttemptId) -> Dispatch | None:
        return self._ids.get(attempt_id)

    def add(self, attempt_id: AttemptId, dispatch: Dispatch | None = None) -> None:
        self._ids[attempt_id] = dispatch
        if len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)

    def discard(self, attempt_id: AttemptId) -> None:
        self._ids.pop(attempt_id, None)


class Ledger:
    """The attempts of one worker."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._entries: dict[AttemptId, Entry] = {}
        self._taken = Recent()
        self._aborted = Recent()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def judge(self, attempt_id: AttemptId, dispatch: Dispatch) -> Verdict:
        """Say what to do with a leg that has arrived."""
        if attempt_id in self._aborted:
            return "aborted"
        if attempt_id in self._taken:
            return "duplicate" if self._taken.dispatch_of(attempt_id) == dispatch else "elsewhere"
        return "full" if len(self._entries) >= self._max_in_flight else "new"

    def take(self, leg: PrefillRequest | DecodeRequest, now: float = 0.0) -> Entry:
        """Hold an attempt from now on (monotonic seconds)."""
        request = leg.request
        is_computing = isinstance(leg, PrefillRequest) or leg.params is None
        entry = Entry(
            attempt_id=request.attempt_id,
            bootstrap=leg.bootstrap if isinstance(leg, PrefillRequest) else None,
            names=names_of(request),
            clock=LegClock(now, leg.prefill_timings if isinstance(leg, DecodeRequest) else NO_TIMINGS),
            stream_subject=request.stream.subject,
            result_subject=leg.result_subject if isinstance(leg, PrefillRequest) else "",
            owner=request.stream.owner,
            deadlines=request.deadlines,
            stage="prefilling" if is_computing else "decoding",
            next_seq=len(request.resume),
        )
        self._entries[request.attempt_id] = entry
        self._taken.add(request.attempt_id, leg.dispatch)
        return entry

    def get(self, attempt_id: AttemptId) -> Entry | None:
        return self._entries.get(attempt_id)

    def close(self, attempt_id: AttemptId) -> Entry | None:
        """Hold an attempt no longer; it stays known, so that a duplicate isn't taken for new."""
        return self._entries.pop(attempt_id, None)

    def refuse(self, attempt_id: AttemptId) -> None:
        """The engine wouldn't have it after all."""
        self.close(attempt_id)
        self._taken.discard(attempt_id)

    def aborted(self, attempt_id: AttemptId) -> None:
        """Remember that an attempt was aborted, whether or not it ever arrived."""
        self._aborted.add(attempt_id)
