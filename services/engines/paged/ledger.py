"""What the scheduler's parts share: the live sequences, their blocks, the totals and the notices not yet taken."""

from bisect import bisect_left, insort
from operator import attrgetter

from schemas.errors import BuswayError, ErrorRecord
from schemas.frames import Failed, Finished, FinishReason
from schemas.ids import AttemptId
from services.engines.paged.blocks import BlockManager
from services.engines.paged.desk import DeskLoad, Notice
from services.engines.paged.limits import Limits
from services.engines.paged.sequence import Sequence, SequenceState

_BY_KEY = attrgetter("key")


class Totals:
    """Counters since start; their meaning is schemas.worker.LoadReport's. num_queued_tokens alone goes up and down."""

    __slots__ = ("num_cached", "num_generated", "num_prompt", "num_queued_tokens", "num_recomputed", "num_steps")

    def __init__(self) -> None:
        self.num_cached = 0
        self.num_generated = 0
        self.num_prompt = 0
        self.num_queued_tokens = 0
        self.num_recomputed = 0
        self.num_steps = 0


class Ranks:
    """Sequences in order of priority (the highest number first), then arrival."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=_BY_KEY)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self.sequences, sequence.key, key=_BY_KEY)
        assert self.sequences[index] is sequence
        del self.sequences[index]


class Ledger:
    """Every live sequence is in `live`, and in `waiting` or (with a slot) `running` unless it is held."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits.num_blocks)
        self.live: dict[AttemptId, Sequence] = {}
        self.waiting = Ranks()
        self.running = Ranks()
        self.num_held = 0
        self.totals = Totals()
        self.notices: list[Notice] = []

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, its slot or the held ones; its blocks stay its own."""
        match sequence.state:
            case SequenceState.WAITING:
                self.waiting.remove(sequence)
            case SequenceState.HELD:
                self.num_held -= 1
            case _:
                self.running.remove(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence without slot and blocks into the queue, its tokens to be computed from the start."""
        sequence.state = SequenceState.WAITING
        sequence.num_computed = 0
        self.waiting.add(sequence)
        self.queue_tokens(sequence, 0 if sequence.purpose == "reserve" else self._num_to_compute(sequence))

    def _num_to_compute(self, sequence: Sequence) -> int:
        """Return the tokens that the cache lacks now: what a router should expect to wait for."""
        table, block_size = sequence.table, self.limits.block_size
        table.extend_hashes(sequence.ids, block_size)
        hits = self.blocks.match(table.hashes, (len(sequence.ids) - 1) // block_size)
        return len(sequence.ids) - len(hits) * block_size

    def queue_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Set how many of a sequence's tokens wait for prefill."""
        tally = sequence.tally
        self.totals.num_queued_tokens += num_tokens - tally.num_queued
        tally.num_queued = num_tokens

    def end(self, sequence: Sequence, *, quarantine: bool = False) -> None:
        """Forget a sequence and free (or set aside) its blocks."""
        self.leave(sequence)
        sequence.state = SequenceState.ENDED
        self.queue_tokens(sequence, 0)
        self.drop_blocks(sequence, quarantine=quarantine)
        del self.live[sequence.attempt_id]

    def drop_blocks(self, sequence: Sequence, *, quarantine: bool = False) -> None:
        """Give up a sequence's blocks; with `quarantine` a transfer may still touch them until it is settled."""
        block_ids = sequence.table.give_up()
        if quarantine:
            self.blocks.quarantine(sequence.attempt_id, block_ids)
        else:
            self.blocks.release(block_ids)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence with a Finished notice."""
        self.end(sequence)
        self.notices.append(
            Finished(
                attempt_id=sequence.attempt_id,
                seq=sequence.num_completion,
                reason=reason,
                usage=sequence.usage(),
                timings=sequence.watch.timings(sequence.tally, now),
            )
        )

    def fail(self, sequence: Sequence, error: ErrorRecord | BuswayError, *, quarantine: bool = False) -> None:
        """End a sequence with a Failed notice."""
        record = error.record() if isinstance(error, BuswayError) else error
        self.end(sequence, quarantine=quarantine)
        self.notices.append(Failed(attempt_id=sequence.attempt_id, seq=sequence.num_completion, error=record))

    def load(self) -> DeskLoad:
        """Return the load now; reads counters only, so that any thread may ask."""
        blocks, totals = self.blocks, self.totals
        return DeskLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            num_held=self.num_held,
            kv_blocks_used=blocks.num_used,
            kv_blocks_cached=blocks.num_cached,
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_quarantined=blocks.num_quarantined,
            queued_prefill_tokens=totals.num_queued_tokens,
            progress=totals.num_steps,
            num_recomputed_tokens=totals.num_recomputed,
            num_prompt_tokens=totals.num_prompt,
            num_cached_tokens=totals.num_cached,
            num_generated_tokens=totals.num_generated,
        )
