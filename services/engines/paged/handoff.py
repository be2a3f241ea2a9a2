"""What all handoffs of one engine share, and the life of one leg. Each leg is one asyncio task of the engine's.

A leg is known to the site from `launch` to `close`. Closing is synchronous and the last thing that happens under its
own name: afterwards the attempt is the scheduler's alone (it decodes) or free, or its blocks are in quarantine and a
task of the site's waits until they are settled.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Literal, TypeVar

import msgspec

from schemas.errors import BuswayError, DeadlineError, EngineError, ErrorRecord, KvTransferFailedError
from schemas.frames import Failed, Finished, Timings
from schemas.hop import Ok
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.peer import Stranded
from schemas.request import GenerateRequest
from schemas.worker import PrefillCost
from services.engines.paged.desk import BlocksReserved, ChunkComputed, Desk, PromptComputed
from services.engines.paged.peers import PeerBook, Spawn
from services.engines.pause import PausePoints
from services.engines.protocol import Emit, EngineEvent, PeerLink
from services.kv.lease import LeaseTable
from services.kv.mover import Move, Mover
from services.pass_times import PassTimes

_log = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)
LegNotice = BlocksReserved | ChunkComputed | PromptComputed

RETRY_GAP_S = 0.05
REMEMBER_S = 600.0
SETTLE_QUICKLY_S = 0.5
FIT_EACH_OF_FIRST = 8
FIT_EVERY = 16


class HandoffOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer_s` bounds a transfer from its start, `rendezvous_s` decode's wait for prefill's answer, where the
    request sets no deadline. `fetch`: who moves a ticket's blocks; auto: decode READs on the same host, else prefill
    WRITEs (a reader that dies in a tcp READ has killed its source)."""

    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    lease_s: float = 10.0
    transfer_s: float = 30.0
    rendezvous_s: float = 600.0
    ask_s: float = 1.0
    fetch: Literal["auto", "read", "write"] = "auto"

    def __post_init__(self) -> None:
        if min(self.lease_s, self.transfer_s, self.rendezvous_s, self.ask_s) <= 0:
            raise ValueError("times must be above 0")


class Totals:
    """Counters since start, kept by the decode side, which knows of every transfer exactly once."""

    def __init__(self) -> None:
        self.kv_transfer_bytes: dict[str, int] = {}
        self.num_remote_prefills = 0
        self.transfer_cost: PrefillCost | None = None
        self._fetch_times = PassTimes()
        self._num_fetches = 0

    def fetched(self, num_tokens: int, seconds: float) -> None:
        """So many tokens' KV were fetched in so long; fitted anew for the first few, then now and then."""
        self._fetch_times.note(num_tokens, seconds)
        self._num_fetches += 1
        if self._num_fetches <= FIT_EACH_OF_FIRST or self._num_fetches % FIT_EVERY == 0:
            self.transfer_cost = self._fetch_times.cost()


class HandoffSite:
    """The shared parts. `legs` are the open ones, `writes` those of closed ones that haven't settled; `timings`: how
    the KV came, of attempts that decode here; `landed`: until when an attempt's Landed is answered again."""

    def __init__(
        self,
        *,
        desk: Desk,
        mover: Mover,
        link: PeerLink,
        peers: PeerBook,
        leases: LeaseTable,
        options: HandoffOptions,
        block_size: int,
        pauses: PausePoints,
        emit: Emit,
        spawn: Spawn,
    ) -> None:
        self.desk = desk
        self.mover = mover
        self.link = link
        self.peers = peers
        self.leases = leases
        self.options = options
        self.block_size = block_size
        self.pauses = pauses
        self.emit = emit
        self.spawn = spawn
        self.totals = Totals()
        self.legs: dict[AttemptId, Leg] = {}
        self.timings: dict[AttemptId, Timings] = {}
        self.writes: dict[AttemptId, list[Move]] = {}
        self.landed: dict[AttemptId, float] = {}

    async def tell_stranded(self, worker: WorkerId, attempt_id: AttemptId, error: BuswayError) -> None:
        """Tell a peer that its leg is on its own; a few tries, since its lease or deadline frees it anyway."""
        message = Stranded(attempt_id=attempt_id, error=error.record())
        for _ in range(3):
            try:
                await self.link.ask(worker, message, Ok, timeout_s=self.options.ask_s)
            except BuswayError as refusal:
                _log.debug("%s wasn't told of a stranded attempt: %s", worker, refusal)
                await asyncio.sleep(RETRY_GAP_S)
            else:
                return

    def keep_until_settled(self, attempt_id: AttemptId, moves: list[Move]) -> None:
        """Settle a quarantined attempt's blocks once these writes of ours from them are over."""
        self.writes[attempt_id] = moves
        self.spawn(self._settle_writes(attempt_id, moves), "settle-writes")

    async def writes_settled(self, attempt_id: AttemptId) -> None:
        """Wait until nothing of a closed attempt's is being written any more."""
        for move in self.writes.get(attempt_id, ()):
            await asyncio.shield(move.settled)

    async def _settle_writes(self, attempt_id: AttemptId, moves: list[Move]) -> None:
        await self.writes_settled(attempt_id)
        self.desk.settle(attempt_id)
        if self.writes.get(attempt_id) is moves:
            del self.writes[attempt_id]


class Leg(ABC):
    """One side of one attempt's handoff. All methods run on the event loop."""

    def __init__(self, site: HandoffSite, request: GenerateRequest) -> None:
        self.site = site
        self.request = request
        self.attempt_id = request.attempt_id
        self._task: asyncio.Task[None] | None = None
        self._scope: asyncio.Timeout | None = None

    def launch(self) -> None:
        """Become known to the site and run."""
        self.site.legs[self.attempt_id] = self
        self._task = self.site.spawn(self._guarded(), f"leg-{self.attempt_id}")

    def close(self) -> None:
        """Become unknown to the site; a run that isn't the caller ends at once."""
        if self.site.legs.get(self.attempt_id) is self:
            del self.site.legs[self.attempt_id]
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    @property
    def is_open(self) -> bool:
        return self.site.legs.get(self.attempt_id) is self

    async def _guarded(self) -> None:
        try:
            await self.run()
        except Exception as error:
            _log.exception("a handoff failed unexpectedly")
            if self.is_open:
                self.abort(EngineError(f"{type(error).__name__}: {error}"))

    @abstractmethod
    async def run(self) -> None:
        """Do the handoff."""

    @abstractmethod
    def notice(self, notice: LegNotice) -> None:
        """Take a notice of the scheduler's."""

    @abstractmethod
    def ended(self, notice: Finished | Failed) -> EngineEvent:
        """The scheduler ended the attempt by itself: close, tell the peer, return the event for the worker."""

    @abstractmethod
    def abort(self, error: BuswayError | None) -> None:
        """Free everything at once; one terminal event when `error` is given. The peer is told."""

    @abstractmethod
    def stranded(self, error: BuswayError) -> None:
        """The peer's leg is over with `error`."""

    @abstractmethod
    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """A worker is gone; it may be this leg's peer."""


def seconds_left(request: GenerateRequest, *, transfer_s: float) -> tuple[float, BuswayError]:
    """Return how long the transfer phase may take from now, and what it is when it takes longer.

    The request's own deadlines (transfer, first token, total) end it; our default makes it a failed transfer.
    """
    deadlines = request.deadlines
    own = [d for d in (deadlines.transfer, deadlines.first_token, deadlines.total) if d is not None]
    left_s = min(own, default=float("inf")) - time.time()
    if left_s <= transfer_s:
        return max(0.0, left_s), DeadlineError("the deadline passed in phase transfer", phase="transfer")
    return transfer_s, KvTransferFailedError(f"no KV within {transfer_s:g} s", phase="transfer")


def record_of(error: BuswayError | None) -> ErrorRecord | None:
    return None if error is None else error.record()
