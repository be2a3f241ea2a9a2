"""A decode worker under Dynamo's rules, each pass at constant cost: what grows is counted, not walked.

Rules: facts of aisimulate/crates/engine/src scheduler/vllm/core.rs@269cc42c and handoff.rs@0894f5c6. A destination is
reserved at once, or in order of coming; activated requests join at the next pass boundary; a request out of blocks
preempts the newest, which is computed again. A prompt that stays here (conditional disaggregation, which Dynamo's
replay has not) is computed as a preempted one is: with the pass that it joins.
"""

from collections import deque
from collections.abc import Callable
from math import inf

from deploy.replay.jobs import Job
from deploy.replay.outcome import Outcome
from deploy.replay.scene import EngineSize
from deploy.replay.timing import DynamoTiming

REPORT_PERIOD_S = 0.5
"""Reports are sent twice a second even without news (services/worker/load.py)."""


class DecodeWorker:
    """Runs lazily: `advance` makes the passes that end until then. `on_reserved` hears whose KV may move now, and
    when; `on_report` hears when a load report is due: `coalesce_s` after a change, and twice a second.

    A request that joins at pass p with n tokens has n + (q - p) of them when pass q begins, so that it needs a new
    block in every pass q = p - n (mod block_size): `_growers` counts requests by that remainder.
    """

    def __init__(
        self,
        size: EngineSize,
        timing: DynamoTiming,
        outcome: Outcome,
        *,
        coalesce_s: float,
        on_reserved: Callable[[Job, float], None],
        on_report: Callable[[float], None],
    ) -> None:
        self.load = _Load()
        self.waiting: deque[Job] = deque()
        self._size = size
        self._timing = timing
        self._outcome = outcome
        self._coalesce_s = coalesce_s
        self._on_reserved = on_reserved
        self._on_report = on_report
        self._activated: deque[tuple[float, Job]] = deque()
        self._running: dict[int, _Member] = {}
        self._clock = _PassClock()
        self._growers = [0] * size.block_size

    @property
    def num_requests(self) -> int:
        """Requests running, reserved for or waiting."""
        return len(self._running) + self.load.num_reserved + len(self.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens to be computed here that no pass has begun to compute."""
        return sum(job.num_tokens for job in (*self.waiting, *(one for _, one in self._activated)) if job.is_local)

    @property
    def pass_end(self) -> float:
        """When the pass under way ends; inf when idle."""
        return self._clock.end

    def take(self, job: Job, now: float) -> None:
        """A request comes whose KV waits elsewhere."""
        self.waiting.append(job)
        self._reserve(now)
        self._news(now)

    def activate(self, job: Job, now: float) -> None:
        """The KV of a reserved request has come."""
        self._activated.append((now, job))

    def advance(self, until: float) -> None:
        """Make every pass that ends until then, and every report due."""
        clock, load = self._clock, self.load
        while True:
            if clock.end == inf and self._activated and self._activated[0][0] < until:
                self._begin(max(self._activated[0][0], clock.last_end))
            if load.report_due < inf and load.report_due <= min(until, clock.end):
                due = load.report_due
                load.report_due = due + REPORT_PERIOD_S if self._running else inf
                self._on_report(due)
            elif clock.end <= until and clock.end < inf:
                self._end()
            else:
                return

    def _begin(self, now: float) -> None:
        """Start a pass, or rest when there is nobody to run."""
        clock, load = self._clock, self.load
        recomputed = 0
        while self._activated and self._activated[0][0] <= now:
            recomputed += self._join(self._activated.popleft()[1])
        if not self._running:
            clock.end = inf
            return
        load.num_blocks += self._growers[clock.number % self._size.block_size]
        while load.num_blocks > self._size.num_blocks and len(self._running) > 1:
            self._preempt()
        clock.length = self._timing.decode_s(load.num_tokens) + self._timing.prefill_s(recomputed)
        clock.end = now + clock.length

    def _end(self) -> None:
        clock, load, running = self._clock, self.load, self._running
        now = clock.last_end = clock.end
        if clock.new:
            for job in clock.new:
                self._outcome.first_token(job, now)
        self._outcome.gaps(clock.length, len(running) - len(clock.new))
        clock.new = []
        load.num_tokens += len(running)
        done = clock.finishing.pop(clock.number, None)
        clock.number += 1
        if done:
            for number in done:
                member = self._leave(number)
                self._outcome.finished(member.job, now)
            self._reserve(now)
            self._news(now)
        self._begin(now)

    def _join(self, job: Job) -> int:
        """Let a request in; return the tokens it has to compute again."""
        clock = self._clock
        num_tokens = job.num_tokens + job.num_emitted
        last = clock.number + job.request.max_tokens - job.num_emitted - 1
        self._running[job.number] = _Member(job, num_tokens, clock.number)
        clock.finishing.setdefault(last, {})[job.number] = None
        clock.new.append(job)
        self.load.num_reserved -= 1
        self.load.num_tokens += num_tokens
        self._growers[(clock.number - num_tokens) % self._size.block_size] += 1
        return num_tokens if job.was_preempted or job.is_local else 0

    def _leave(self, number: int) -> "_Member":
        """Take a request out, its tokens and blocks with it."""
        member = self._running.pop(number)
        clock, load = self._clock, self.load
        num_passes = clock.number - member.joined_at
        member.job.num_emitted += num_passes
        load.num_tokens -= member.num_tokens + num_passes
        load.num_blocks -= self._num_blocks(member.num_tokens + num_passes)
        self._growers[(member.joined_at - member.num_tokens) % self._size.block_size] -= 1
        return member

    def _preempt(self) -> None:
        """Drop the newest request's KV and put it to the front of the queue."""
        clock = self._clock
        number = next(reversed(self._running))
        job = self._running[number].job
        last = self._running[number].joined_at + job.request.max_tokens - job.num_emitted - 1
        if self._has_grown(self._running[number]):
            self.load.num_blocks -= 1
        self._leave(number)
        del clock.finishing[last][number]
        if job in clock.new:
            clock.new.remove(job)
        job.was_preempted, job.last_token_at = True, clock.last_end
        self.waiting.appendleft(job)

    def _has_grown(self, member: "_Member") -> bool:
        """Whether the pass that is about to begin gave it a new block already."""
        return (self._clock.number - member.joined_at + member.num_tokens) % self._size.block_size == 0

    def _reserve(self, now: float) -> None:
        """Give the queue's head slots and blocks while there are some."""
        load, size = self.load, self._size
        while self.waiting:
            job = self.waiting[0]
            num_blocks = self._num_blocks(job.num_tokens + job.num_emitted)
            has_slot = len(self._running) + load.num_reserved < size.max_num_seqs
            if not has_slot or load.num_blocks + num_blocks > size.num_blocks:
                return
            self.waiting.popleft()
            load.num_blocks += num_blocks
            load.num_reserved += 1
            if job.was_preempted or job.is_local:
                self._activated.append((now, job))
            else:
                self._on_reserved(job, now)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size.block_size)

    def _news(self, now: float) -> None:
        self.load.report_due = min(self.load.report_due, now + self._coalesce_s)


class _Load:
    """Blocks used (reserved ones too), tokens of running requests, destinations reserved, the next report's time."""

    __slots__ = ("num_blocks", "num_reserved", "num_tokens", "report_due")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_tokens = 0
        self.num_reserved = 0
        self.report_due = inf


class _Member:
    """A running request: its tokens when it joined, and at which pass."""

    __slots__ = ("job", "joined_at", "num_tokens")

    def __init__(self, job: Job, num_tokens: int, joined_at: int) -> None:
        self.job = job
        self.num_tokens = num_tokens
        self.joined_at = joined_at


class _PassClock:
    """The pass under way: its number, length and end; who is new in it; who finishes at the end of which pass."""

    __slots__ = ("end", "finishing", "last_end", "length", "new", "number")

    def __init__(self) -> None:
        self.number = 0
        self.length = 0.0
        self.end = inf
        self.last_end = 0.0
        self.new: list[Job] = []
        self.finishing: dict[int, dict[int, None]] = {}
