"""What every worker has to do: its own LoadReport plus this router's dispatches that the report hasn't counted yet.

Pure. A report says, for this router's epoch, the highest dispatch number it has counted, so nothing is counted twice
and nothing is late: eight prompts sent at once to four idle workers see one another (other routers' dispatches are one
report stale, no more). Load is given back by the report itself; `give_back` is for legs that no worker ever held.
"""

from collections.abc import Container, Set

import msgspec

from schemas.ids import Epoch, WorkerId
from schemas.worker import LoadReport, PrefillCost
from services.router.estimates import DEFAULT_COST, pass_s

UNCOUNTED_LIMIT_S = 2.0
"""A worker reports twice a second: a dispatch that no report has counted by then was lost on the way."""


class Uncounted(msgspec.Struct, frozen=True, kw_only=True):
    num_tokens: int
    kv_tokens: int
    sent_at: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`queued_tokens` wait for prefill, the `pass_tokens` of the pass under way included, which takes `pass_rest_s`
    more; `requests` are running or waiting; `kv_used` is a share of the pool, `kv_blocks` the blocks, and
    `coming_tokens` those of requests that no report has counted yet."""

    requests: int
    queued_tokens: int
    kv_used: float
    is_suspect: bool
    pass_tokens: int = 0
    pass_rest_s: float = 0.0
    prefill_cost: PrefillCost | None = None
    kv_blocks: int = 0
    coming_tokens: int = 0


class _Entry(msgspec.Struct):
    report: LoadReport | None = None
    reported_at: float = 0.0
    uncounted: dict[int, Uncounted] = {}
    is_suspect: bool = False
    steady: WorkerLoad | None = None


_NOTHING = _Entry()


class LoadBook:
    """The loads of all workers as one router knows them. Times are monotonic seconds."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch_key = str(epoch)
        self._last_number = 0
        self._entries: dict[WorkerId, _Entry] = {}

    @property
    def workers(self) -> Set[WorkerId]:
        """Those of whom anything is known."""
        return self._entries.keys()

    def next_number(self) -> int:
        """Return the number of the next dispatch."""
        self._last_number += 1
        return self._last_number

    def add(self, worker: WorkerId, number: int, num_tokens: int, now: float, *, kv_tokens: int = 0) -> None:
        """Count a dispatch until a report of that worker does: tokens to compute, and tokens its KV will hold."""
        entry = self._changed(worker)
        if number > self._counted(entry):
            entry.uncounted[number] = Uncounted(num_tokens=num_tokens, kv_tokens=kv_tokens, sent_at=now)

    def give_back(self, worker: WorkerId, number: int) -> None:
        """The worker never held that dispatch."""
        if worker in self._entries:
            self._changed(worker).uncounted.pop(number, None)

    def suspect(self, worker: WorkerId) -> None:
        """The worker let a hop's second pass in silence: avoid it until it reports again."""
        self._changed(worker).is_suspect = True

    def report(self, report: LoadReport, now: float = 0.0) -> None:
        """Take a worker's report; one of an older epoch than its last is dropped, a newer one starts afresh."""
        entry = self._changed(report.worker_id)
        if entry.report is not None and report.epoch < entry.report.epoch:
            return
        entry.report, entry.reported_at = report, now
        entry.is_suspect = False
        counted = self._counted(entry)
        entry.uncounted = {number: one for number, one in entry.uncounted.items() if number > counted}

    def forget(self, worker: WorkerId, live: Container[WorkerId]) -> None:
        """The worker left or began a new epoch; also forget what late reports and acks left of others that have."""
        self._entries = {id: entry for id, entry in self._entries.items() if id in live and id != worker}

    def load(self, worker: WorkerId, now: float) -> WorkerLoad:
        """Return what that worker has to do."""
        entry = self._entries.get(worker, _NOTHING)
        if entry.steady is not None:
            return entry.steady
        load = self._load(entry, now)
        if entry is not _NOTHING and not entry.uncounted and not load.pass_tokens:
            entry.steady = load  # time doesn't change it
        return load

    def _load(self, entry: _Entry, now: float) -> WorkerLoad:
        fresh = [one for one in entry.uncounted.values() if now - one.sent_at < UNCOUNTED_LIMIT_S]
        num_tokens = sum(one.num_tokens for one in fresh)
        coming = sum(one.kv_tokens for one in fresh)
        report = entry.report
        if report is None:
            return WorkerLoad(
                requests=len(fresh),
                queued_tokens=num_tokens,
                kv_used=0.0,
                is_suspect=entry.is_suspect,
                coming_tokens=coming,
            )
        return WorkerLoad(
            requests=len(fresh) + report.running + report.waiting,
            queued_tokens=num_tokens + report.queued_prefill_tokens,
            kv_used=report.kv_blocks_used / max(report.kv_blocks_total, 1),
            is_suspect=entry.is_suspect,
            pass_tokens=report.pass_tokens,
            pass_rest_s=_pass_rest_s(report, now - entry.reported_at),
            prefill_cost=report.prefill_cost,
            kv_blocks=report.kv_blocks_used,
            coming_tokens=coming,
        )

    def _changed(self, worker: WorkerId) -> _Entry:
        entry = self._entries.setdefault(worker, _Entry())
        entry.steady = None
        return entry

    def _counted(self, entry: _Entry) -> int:
        return entry.report.dispatched.get(self._epoch_key, 0) if entry.report else 0


def _pass_rest_s(report: LoadReport, age_s: float) -> float:
    """Return what is left of the pass that was under way when the report was made, `age_s` ago."""
    return max(0.0, pass_s(report.prefill_cost or DEFAULT_COST, report.pass_tokens) - report.pass_age_s - age_s)
