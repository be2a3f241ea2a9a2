"""Which of the candidates gets a leg. Pure; a policy is a score (least wins), ties go to whoever waited longest.

queue: NATS picks a member of the chosen one's queue group; that member's ack tells who it was.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from schemas.ids import WorkerId
from services.config import PolicyName
from services.router.candidates import Candidate

Leg = Literal["prefill", "decode"]
Score = Callable[[Leg, Candidate], tuple[float, ...]]


def _even(leg: Leg, candidate: Candidate) -> tuple[float, ...]:
    return ()


def _load(leg: Leg, candidate: Candidate) -> tuple[float, ...]:
    """Prefill: the tokens queued. Decode and aggregated: the share of slots asked for, then of the pool in use."""
    load, config = candidate.load, candidate.config
    if leg == "prefill":
        return (float(load.queued_tokens), float(load.requests))
    return (load.requests / max(config.max_num_seqs, 1), load.kv_used)


SCORES: dict[PolicyName, Score] = {"round_robin": _even, "least_loaded": _load, "kv": _load, "queue": _even}
"""kv chooses by kv_policy.py."""


class Picker:
    """Picks by the policy's score; remembers only who was picked when, for ties.

    Equal candidates take turns: always taking the first would pile work (and cached prefixes) onto one worker.
    """

    def __init__(self, policy: PolicyName) -> None:
        self.is_group = policy == "queue"
        self._score = SCORES[policy]
        self._turn = 0
        self._picked: dict[tuple[Leg, WorkerId], int] = {}

    def pick(self, leg: Leg, candidates: Sequence[Candidate]) -> Candidate:
        """Return who gets the leg; `candidates` isn't empty."""
        best = min(
            candidates,
            key=lambda one: (self._score(leg, one), self._picked.get((leg, one.config.worker_id), 0)),
        )
        self._turn += 1
        self._picked[leg, best.config.worker_id] = self._turn
        return best

    def forget(self, worker: WorkerId) -> None:
        """The worker left."""
        self._picked.pop(("prefill", worker), None)
        self._picked.pop(("decode", worker), None)
