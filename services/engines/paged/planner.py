"""What the next step computes: decodes first, then prompt chunks, then whoever can be admitted.

Admission takes all blocks of a prompt at once, so only decoding sequences ever need more; when the pool is out of
blocks the newest sequence that nobody else knows of gives up its own and is computed again later. The oldest one
therefore always gets on: no two can wait for each other.
"""

import msgspec

from services.engines.paged.desk import BlocksReserved, ChunkComputed
from services.engines.paged.ledger import Ledger
from services.engines.paged.runner import Slice
from services.engines.paged.sequence import Sequence, SequenceState


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step: `slices[i]` belongs to `sequences[i]`; decodes (one token each) come first."""

    slices: list[Slice]
    sequences: list[Sequence]
    num_decodes: int

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices[self.num_decodes :])


class Planner:
    """Chooses the slices of a step and hands out slots and blocks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._limits = ledger.limits
        self._slices: list[Slice] = []
        self._sequences: list[Sequence] = []

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None when nothing can be computed until an order comes."""
        self._slices, self._sequences = [], []
        budget = self._limits.max_batched_tokens
        self._plan_decodes(budget)
        num_decodes = len(self._slices)
        budget = self._plan_chunks(budget - num_decodes)
        self._admit(budget, now)
        if not self._slices:
            return None
        return StepPlan(slices=self._slices, sequences=self._sequences, num_decodes=num_decodes)

    def _plan_decodes(self, budget: int) -> None:
        """Add one token of each decoding sequence, oldest first, preempting the newest where blocks are lacking."""
        running, block_size = self._ledger.running.sequences, self._limits.block_size
        index = 0
        while index < len(running) and len(self._slices) < budget:
            sequence = running[index]
            if sequence.state is not SequenceState.DECODING:
                index += 1
                continue
            if sequence.num_computed == len(sequence.table.blocks) * block_size and not self._grow(sequence):
                self._preempt_newest()
                continue
            self._add(sequence, 1)
            index += 1

    def _grow(self, sequence: Sequence) -> bool:
        blocks = self._ledger.blocks
        if not blocks.num_available:
            return False
        sequence.table.blocks += blocks.take((), 1)
        return True

    def _preempt_newest(self) -> None:
        # There is one: the sequence that asked is decoding. It isn't in the plan yet, nor is any newer one. It won't
        # be let in again at once either: it needs at least the blocks it gave up, and one of them goes to an older one.
        ledger = self._ledger
        sequence = next(s for s in reversed(ledger.running.sequences) if s.is_preemptible)
        ledger.leave(sequence)
        ledger.drop_blocks(sequence)
        sequence.purpose = "generate"
        sequence.tally.expected_below = max(sequence.tally.expected_below, sequence.num_computed)
        ledger.wait(sequence)

    def _plan_chunks(self, budget: int) -> int:
        """Add chunks of the prompts under way, oldest first; return the budget left."""
        for sequence in self._ledger.running.sequences:
            if budget <= 0:
                break
            if sequence.state is SequenceState.PREFILLING:
                budget -= self._add(sequence, budget)
        return budget

    def _admit(self, budget: int, now: float) -> None:
        """Let the queue in, in its order, until its head lacks a slot, blocks or budget."""
        ledger = self._ledger
        max_running = min(self._limits.max_num_seqs, self._limits.max_batched_tokens)
        queue = ledger.waiting.sequences
        while queue and len(ledger.running) < max_running:
            sequence = queue[0]
            if sequence.purpose != "reserve" and budget <= 0:
                return
            if not self._take_blocks(sequence):
                return
            self._start(sequence, now)
            if sequence.state is SequenceState.PREFILLING:
                budget -= self._add(sequence, budget)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a waiting sequence all blocks of its tokens so far, cached ones first, if they can be had."""
        ledger, table, limits = self._ledger, sequence.table, self._limits
        table.extend_hashes(sequence.ids, limits.block_size)
        # The last token is always computed (or transferred): its logits are needed, and its block gets written.
        hits = ledger.blocks.match(table.hashes, (len(sequence.ids) - 1) // limits.block_size)
        num_new = limits.num_blocks_for(len(sequence.ids)) - len(hits)
        if not ledger.blocks.can_take(hits, num_new):
            return False
        table.blocks = ledger.blocks.take(hits, num_new)
        table.num_published = len(hits)
        sequence.num_computed = len(hits) * limits.block_size
        return True

    def _start(self, sequence: Sequence, now: float) -> None:
        """Move a sequence that has its blocks from the queue into a slot."""
        ledger = self._ledger
        ledger.leave(sequence)
        if not sequence.watch.admitted:
            sequence.watch.admitted = now
        self._count_hit(sequence)
        if sequence.purpose == "reserve":
            sequence.state = SequenceState.AWAITING_KV
            ledger.notices.append(
                BlocksReserved(
                    attempt_id=sequence.attempt_id,
                    block_ids=tuple(sequence.table.blocks),
                    num_cached_blocks=sequence.table.num_published,
                    queue_s=sequence.watch.queue_s(),
                )
            )
        else:
            sequence.state = SequenceState.PREFILLING
            ledger.queue_tokens(sequence, len(sequence.ids) - sequence.num_computed)
            if sequence.reports_chunks and sequence.num_computed:
                self._report_cached_prefix(sequence)
        ledger.running.add(sequence)

    def _count_hit(self, sequence: Sequence) -> None:
        """Count a prompt's local prefix hit, the first time it is admitted: whole blocks, resumed ids not counted."""
        if sequence.tally.num_cached < 0:
            block_size = self._ledger.limits.block_size
            sequence.tally.num_cached = min(sequence.num_computed, sequence.num_prompt // block_size * block_size)
            self._ledger.totals.num_prompt += sequence.num_prompt
            self._ledger.totals.num_cached += sequence.tally.num_cached

    def _report_cached_prefix(self, sequence: Sequence) -> None:
        self._ledger.notices.append(
            ChunkComputed(
                attempt_id=sequence.attempt_id,
                block_ids=tuple(sequence.table.blocks),
                num_computed_tokens=sequence.num_computed,
            )
        )

    def _add(self, sequence: Sequence, budget: int) -> int:
        """Add up to `budget` of a sequence's missing tokens to the plan; return how many."""
        start, ids = sequence.num_computed, sequence.ids
        end = min(len(ids), start + budget)
        self._slices.append(
            Slice(
                attempt_id=sequence.request.attempt_id,
                token_ids=ids[start:end],
                start=start,
                block_table=sequence.table.blocks,
                sample=sequence.sample_spec() if end == len(ids) else None,
            )
        )
        self._sequences.append(sequence)
        return end - start
