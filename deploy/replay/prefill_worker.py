"""A prefill worker under Dynamo's rules: passes of a token budget, running prompts first, then the queue in order.

Rules: facts of aisimulate/crates/engine/src scheduler/vllm/core.rs@269cc42c. Arrivals wait for the pass boundary;
blocks that one scheduling decision completes serve later prompts of the same pass; events are told at pass end.
"""

from collections import deque

from deploy.replay.block_pool import BlockPool
from deploy.replay.jobs import Job
from deploy.replay.scene import EngineSize
from deploy.replay.timing import DynamoTiming


class PrefillWorker:
    """One worker's queue, blocks and pass under way (`pass_tokens` of it, since `pass_start`)."""

    def __init__(self, size: EngineSize, timing: DynamoTiming) -> None:
        self.pool = BlockPool(size.num_blocks)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.is_busy = False
        self.pass_start = 0.0
        self.pass_tokens = 0
        self._size = size
        self._timing = timing
        self._chunks: list[tuple[Job, int]] = []

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute, the pass under way included; of waiting prompts what their router expects."""
        waiting = sum(job.num_tokens - job.expected_cached for job in self.waiting)
        return waiting + sum(job.num_left for job in self.running)

    def begin_pass(self, now: float) -> float | None:
        """Plan a pass and return when it ends; None when there is nothing to compute."""
        self._chunks = []
        budget = self._plan_running(self._size.max_batched_tokens)
        if budget >= 0:
            self._admit(budget)
        if not self._chunks:
            return None
        self.is_busy, self.pass_start = True, now
        self.pass_tokens = self._num_computed()
        return now + self._timing.prefill_s(self.pass_tokens)

    def end_pass(self) -> list[Job]:
        """Take the pass's results; return the prompts that are done, whose blocks are held until `release`."""
        self.is_busy, self.pass_tokens = False, 0
        done = []
        for job, num_tokens in self._chunks:
            job.num_computed += num_tokens
            if not job.num_left:
                self.running.remove(job)
                done.append(job)
        self._chunks = []
        return done

    def release(self, job: Job) -> None:
        """Free a prompt's blocks; those with a hash stay in the cache."""
        self.pool.release(job.published, job.num_private)
        job.published, job.num_private = [], 0

    def _plan_running(self, budget: int) -> int:
        """Continue the prompts under way; return the budget left, -1 when one had to be preempted."""
        was_preempted = False
        for job in list(self.running):
            if budget <= 0 or job not in self.running:
                break
            num_tokens = min(budget, job.num_left)
            while not self._grow(job, num_tokens):
                was_preempted = True
                newest = self.running.pop()
                self._preempt(newest)
                if newest is job:
                    return -1
            budget -= self._add(job, num_tokens)
        return -1 if was_preempted else budget

    def _admit(self, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._size.max_num_seqs:
            job = self.waiting[0]
            hits = self.pool.hold_prefix(job.keys, (job.num_tokens - 1) // self._size.block_size)
            job.published, job.num_private = job.keys[:hits], 0
            job.num_computed = hits * self._size.block_size
            num_tokens = min(budget, job.num_left)
            if not self._grow(job, num_tokens):
                self.release(job)
                job.num_computed = 0
                return
            if job.num_cached < 0:
                job.num_cached = job.num_computed
            self.waiting.popleft()
            self.running.append(job)
            budget -= self._add(job, num_tokens)

    def _grow(self, job: Job, num_tokens: int) -> bool:
        needed = -(-(job.num_computed + num_tokens) // self._size.block_size)
        num_new = needed - len(job.published) - job.num_private
        if not self.pool.take(num_new):
            return False
        job.num_private += num_new
        return True

    def _add(self, job: Job, num_tokens: int) -> int:
        """Put a chunk into the pass and publish the blocks it completes."""
        self._chunks.append((job, num_tokens))
        size = self._size.block_size
        keys = job.keys[job.num_computed // size : (job.num_computed + num_tokens) // size]
        for key, is_taken in zip(keys, self.pool.publish(keys), strict=True):
            if is_taken:
                job.published.append(key)
                job.num_private -= 1
        return num_tokens

    def _preempt(self, job: Job) -> None:
        """Drop a prompt's KV and put it back to the front of the queue (LIFO preemption)."""
        self._chunks = [(other, count) for other, count in self._chunks if other is not job]
        self.release(job)
        job.num_computed = 0
        self.waiting.appendleft(job)

    def _num_computed(self) -> int:
        """Return the pass's tokens as Dynamo counts them: both means are rounded down first."""
        n = len(self._chunks)
        prefixes = sum(job.num_computed for job, _ in self._chunks)
        lengths = prefixes + sum(count for _, count in self._chunks)
        return n * (lengths // n - prefixes // n)
