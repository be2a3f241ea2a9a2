"""Continuous batching over a paged KV pool: orders in, step plans out, results in, notices out.

Pure: no I/O, no clock (`now` is passed, in seconds of the clock that the requests' deadlines are on), no threads. Its
driver applies orders, calls `schedule`, runs the plan, gives `apply` its results, and has the notices by `take`.
Orders for attempts that are unknown or over are passed over: they race with the attempts' ends.
"""

from collections.abc import Sequence as Seq
from math import inf

from schemas.errors import EngineError, ErrorRecord
from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId
from schemas.kv_events import KvChange
from schemas.request import GenerateRequest
from services.engines.paged.completion import Completion
from services.engines.paged.desk import DeskLoad, Notice
from services.engines.paged.ledger import Ledger
from services.engines.paged.limits import Limits
from services.engines.paged.planner import Planner, StepPlan
from services.engines.paged.runner import Draw
from services.engines.paged.sequence import Purpose, Sequence, SequenceState


class Scheduler:
    """Orders are those of services.engines.paged.desk.Desk; requests must have passed the Limits' checks."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ledger = Ledger(limits)
        self._planner = Planner(self._ledger)
        self._completion = Completion(self._ledger)
        self._num_arrived = 0
        self.next_deadline = inf

    def generate(self, request: GenerateRequest, now: float) -> None:
        """Queue a request for prefill and decode here; one whose resumed ids end it already finishes at once."""
        self._submit(request, "generate", now)

    def hold(self, request: GenerateRequest, now: float, *, report_chunks: bool) -> None:
        """Queue a request for prefill only; its blocks are held from the first token until `release`."""
        self._submit(request, "hold", now, reports_chunks=report_chunks)

    def reserve(self, request: GenerateRequest, now: float) -> None:
        """Queue a request for a slot and blocks that a peer's KV will fill."""
        self._submit(request, "reserve", now)

    def begin(
        self,
        attempt_id: AttemptId,
        now: float,
        *,
        first_token_id: int,
        first_logprobs: TokenLogprobs | None,
        num_cached_tokens: int,
    ) -> None:
        """Decode a reserved sequence whose KV has come."""
        sequence = self._ledger.live.get(attempt_id)
        if sequence is None:
            return
        if sequence.state is not SequenceState.AWAITING_KV:
            self._ledger.fail(sequence, EngineError(f"KV came to a sequence in state {sequence.state.value}"))
            return
        sequence.purpose = "generate"
        sequence.watch.kv_settled = now
        sequence.tally.num_cached = num_cached_tokens
        self._completion.first_token(sequence, first_token_id, first_logprobs, now)
        self.next_deadline = min(self.next_deadline, now)

    def recompute(self, attempt_id: AttemptId, now: float, *, quarantine: bool = False) -> None:
        """Compute a reserved prompt here. With `quarantine` its blocks are set aside and it queues for others."""
        sequence = self._ledger.live.get(attempt_id)
        if sequence is None or sequence.purpose != "reserve":
            return
        ledger = self._ledger
        sequence.purpose = "generate"
        sequence.watch.kv_settled = now
        if sequence.state is SequenceState.WAITING:
            ledger.queue_tokens(sequence, len(sequence.ids))
        elif quarantine:
            ledger.leave(sequence)
            ledger.drop_blocks(sequence, quarantine=True)
            ledger.wait(sequence)
        else:
            sequence.state = SequenceState.PREFILLING
            ledger.queue_tokens(sequence, len(sequence.ids) - sequence.num_computed)
        self.next_deadline = min(self.next_deadline, now)

    def release(self, attempt_id: AttemptId) -> None:
        """Free a held prompt."""
        sequence = self._ledger.live.get(attempt_id)
        if sequence is not None and sequence.state is SequenceState.HELD:
            self._ledger.end(sequence)

    def abort(self, attempt_id: AttemptId, *, error: ErrorRecord | None = None, quarantine: bool = False) -> None:
        """End an attempt in any state, silently or with `error`."""
        sequence = self._ledger.live.get(attempt_id)
        if sequence is None:
            return
        if error is None:
            self._ledger.end(sequence, quarantine=quarantine)
        else:
            self._ledger.fail(sequence, error, quarantine=quarantine)

    def settle(self, attempt_id: AttemptId) -> None:
        """Free the blocks that an attempt left in quarantine."""
        self._ledger.blocks.settle(attempt_id)

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step to run; None: nothing to do until an order comes or `next_deadline` passes."""
        if now >= self.next_deadline:
            self._drop_overdue(now)
        return self._planner.plan(now)

    def apply(self, plan: StepPlan, sampled: Seq[Draw | None], now: float) -> None:
        """Take the results of a planned step, one for each slice. Plans are applied in the order they were made."""
        self._completion.apply(plan, sampled, now)

    def take(self) -> list[Notice]:
        """Return the notices since the last call, in order."""
        notices, self._ledger.notices = self._ledger.notices, []
        return notices

    def cache_changes(self) -> tuple[KvChange, ...]:
        """Return what the prefix cache gained and lost since the last call, in order."""
        return self._ledger.blocks.log.take()

    def load(self) -> DeskLoad:
        """Return the load now; any thread may ask."""
        return self._ledger.load()

    def _submit(self, request: GenerateRequest, purpose: Purpose, now: float, *, reports_chunks: bool = False) -> None:
        if request.attempt_id in self._ledger.live:
            return
        self._num_arrived += 1
        sequence = Sequence(request, purpose, arrival=self._num_arrived, limits=self._limits, now=now)
        sequence.reports_chunks = reports_chunks
        self._ledger.live[request.attempt_id] = sequence
        self._ledger.wait(sequence)
        self.next_deadline = min(self.next_deadline, sequence.first_deadline())
        if self._limits.is_complete(request):
            reason = sequence.rules.reason(sequence.ids)
            assert reason is not None
            self._ledger.finish(sequence, reason, now)

    def _drop_overdue(self, now: float) -> None:
        """Fail every sequence whose deadline has passed and find the next one to watch."""
        self.next_deadline = inf
        for sequence in list(self._ledger.live.values()):
            phase = sequence.overdue(now)
            if phase is not None:
                self._ledger.fail(sequence, sequence.deadline_error(phase, now))
            else:
                self.next_deadline = min(self.next_deadline, sequence.first_deadline(after=now))
