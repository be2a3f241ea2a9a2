"""One attempt's tokens, blocks, rules and times inside the engine. Pure state: the scheduler moves it on."""

from enum import Enum
from math import inf
from typing import Literal

from schemas.errors import DeadlineError, Phase
from schemas.frames import FinishReason, Timings, Usage
from schemas.ids import AttemptId
from schemas.request import GenerateRequest
from services.engines.paged.hashing import BlockHash, extend_hashes, root_hash
from services.engines.paged.limits import Limits
from services.engines.paged.runner import SampleSpec
from services.prefix_hash import chain
from services.prefix_hash import root_hash as root_name

Purpose = Literal["generate", "hold", "reserve"]


class SequenceState(Enum):
    """waiting -> prefilling | awaiting_kv -> decoding | held -> ended; a preempted sequence waits again."""

    WAITING = "waiting"
    AWAITING_KV = "awaiting_kv"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    ENDED = "ended"


class StopRules:
    """When a completion ends and which ids may not be drawn before min_tokens."""

    __slots__ = ("_banned", "_min_len", "_stop_ids", "max_len")

    def __init__(self, request: GenerateRequest, limits: Limits) -> None:
        stop, num_prompt = request.stop, len(request.token_ids)
        self._stop_ids = limits.stop_ids(request)
        self._min_len = num_prompt + stop.min_tokens
        self._banned = tuple(sorted({*limits.eos_token_ids, *stop.stop_token_ids}))
        self.max_len = num_prompt + stop.max_tokens

    def banned_at(self, position: int) -> tuple[int, ...]:
        """Return the ids that may not be drawn at this position of the sequence."""
        return self._banned if position < self._min_len else ()

    def reason(self, ids: list[int]) -> FinishReason | None:
        """Return why the completion ends with the last of `ids`, or None."""
        if ids[-1] in self._stop_ids:
            return "stop"
        return "length" if len(ids) >= self.max_len else None


class BlockTable:
    """The blocks of a sequence in order of position, the hashes of its full ones, and their `names` for routers: that
    of a block is names[index + 1], that of its parent names[index]."""

    __slots__ = ("_root", "blocks", "hashes", "names", "num_published")

    def __init__(self, cache_salt: str) -> None:
        self._root = root_hash(cache_salt)
        self.blocks: list[int] = []
        self.hashes: list[BlockHash] = []
        self.names = [root_name(cache_salt)]
        self.num_published = 0

    def extend_hashes(self, ids: list[int], block_size: int) -> None:
        """Name all full blocks of `ids`."""
        num_named = len(self.hashes)
        extend_hashes(self.hashes, self._root, ids, block_size)
        if len(self.hashes) > num_named:
            end = len(self.hashes) * block_size
            self.names += chain(self.names[-1], ids[num_named * block_size : end], block_size)

    def give_up(self) -> list[int]:
        """Return the blocks, whose references are the caller's from now on, and forget them."""
        blocks, self.blocks, self.num_published = self.blocks, [], 0
        return blocks


class Tally:
    """What usage and load counters say of a sequence.

    `is_remote`: its KV was awaited from a peer. `expected_below`: positions below were, or should have been, there
    already; computing them here is a recompute. `num_queued`: its share of the load's queued_prefill_tokens.
    """

    __slots__ = ("expected_below", "is_remote", "num_cached", "num_computed_prompt", "num_queued")

    def __init__(self, *, is_remote: bool, expected_below: int) -> None:
        self.is_remote = is_remote
        self.expected_below = expected_below
        self.num_cached = -1
        self.num_computed_prompt = 0
        self.num_queued = 0


class Stopwatch:
    """When a sequence first passed each point, in the scheduler's time (seconds; 0.0: not yet)."""

    __slots__ = ("admitted", "first_token", "kv_settled", "submitted")

    def __init__(self, now: float) -> None:
        self.submitted = now
        self.admitted = 0.0
        self.kv_settled = 0.0
        self.first_token = 0.0

    def queue_s(self) -> float:
        """Seconds from submission to admission."""
        return max(0.0, self.admitted - self.submitted)

    def prefill_s(self) -> float:
        """Seconds from admission (or from the order to recompute) to the first token."""
        return max(0.0, self.first_token - max(self.admitted, self.kv_settled))

    def timings(self, tally: Tally, now: float) -> Timings:
        """Return the phases of a sequence that ends now."""
        queue_s = self.queue_s()
        return Timings(
            prefill_queue_s=0.0 if tally.is_remote else queue_s,
            decode_queue_s=queue_s if tally.is_remote else 0.0,
            prefill_s=self.prefill_s() if tally.num_computed_prompt else 0.0,
            transfer_s=max(0.0, self.kv_settled - self.admitted) if self.kv_settled else 0.0,
            decode_s=max(0.0, now - self.first_token) if self.first_token else 0.0,
        )


class Sequence:
    """Token ids (prompt, then completion, resumed ids included) and where their KV is.

    `ids` is shared with the runner as SampleSpec.history. KV of positions [0, num_computed) is complete.
    """

    __slots__ = (
        "ids",
        "key",
        "num_computed",
        "purpose",
        "reports_chunks",
        "request",
        "rules",
        "state",
        "table",
        "tally",
        "watch",
    )

    def __init__(self, request: GenerateRequest, purpose: Purpose, *, arrival: int, limits: Limits, now: float) -> None:
        self.request = request
        self.purpose: Purpose = purpose
        self.reports_chunks = False
        self.state = SequenceState.WAITING
        self.key = (-request.priority, arrival)
        self.ids = [*request.token_ids, *request.resume]
        self.num_computed = 0
        self.rules = StopRules(request, limits)
        self.table = BlockTable(request.cache_salt)
        self.tally = Tally(is_remote=purpose == "reserve", expected_below=len(self.ids) if purpose == "reserve" else 0)
        self.watch = Stopwatch(now)

    @property
    def attempt_id(self) -> AttemptId:
        return self.request.attempt_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_completion(self) -> int:
        """Completion tokens so far, resumed ones included."""
        return len(self.ids) - len(self.request.token_ids)

    @property
    def is_preemptible(self) -> bool:
        """Whether its KV may be dropped and computed again: nobody but this engine knows its blocks."""
        return self.state is SequenceState.DECODING or (
            self.state is SequenceState.PREFILLING and self.purpose == "generate"
        )

    def sample_spec(self) -> SampleSpec:
        """Return how to draw the token after the last of `ids`."""
        request, ids = self.request, self.ids
        return SampleSpec(
            sampling=request.sampling,
            position=len(ids),
            history=ids,
            num_prompt_tokens=len(request.token_ids),
            banned=self.rules.banned_at(len(ids)),
            num_logprobs=request.num_logprobs,
        )

    def usage(self) -> Usage:
        """Return the token counts as of now."""
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_completion,
            cached_tokens=max(0, self.tally.num_cached),
            num_computed_prompt_tokens=self.tally.num_computed_prompt,
        )

    def first_deadline(self, after: float = -inf) -> float:
        """Return the earliest deadline of this sequence later than `after` (inf: none)."""
        deadlines = self.request.deadlines
        found = (deadlines.queue, deadlines.prefill, deadlines.first_token, deadlines.total)
        return min((deadline for deadline in found if deadline is not None and deadline > after), default=inf)

    def overdue(self, now: float) -> Phase | None:
        """Return the phase whose deadline has passed, or None.

        Never for awaited or held KV: a transfer may be touching the blocks, so those states end by order only.
        """
        deadlines, state = self.request.deadlines, self.state
        if state not in (SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.DECODING):
            return None
        if deadlines.total is not None and now >= deadlines.total:
            return "queue" if state is SequenceState.WAITING else "total"
        if self.watch.first_token:
            return None
        return self._overdue_before_first_token(now)

    def _overdue_before_first_token(self, now: float) -> Phase | None:
        deadlines = self.request.deadlines
        if not self.watch.admitted and deadlines.queue is not None and now >= deadlines.queue:
            return "queue"
        if deadlines.prefill is not None and now >= deadlines.prefill and self.purpose != "reserve":
            return "queue" if self.state is SequenceState.WAITING else "prefill"
        if deadlines.first_token is not None and now >= deadlines.first_token:
            return "queue" if self.state is SequenceState.WAITING else "prefill"
        return None

    def deadline_error(self, phase: Phase, now: float) -> DeadlineError:
        """Return the error of a passed deadline."""
        waited_s = now - self.watch.submitted
        return DeadlineError(
            f"the deadline passed in phase {phase} after {waited_s:.3f} s in state {self.state.value}", phase=phase
        )
