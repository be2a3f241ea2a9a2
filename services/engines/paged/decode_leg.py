"""The decode side that both handoffs share: wait for blocks, obtain the KV, then decode; or go on without it.

Blocks that anything may still write to are never used again before that is over: `Landing` says when.
"""

import asyncio
import logging
import time
from abc import abstractmethod
from typing import Protocol

import msgspec

from schemas.errors import (
    AbortedError,
    BusError,
    BuswayError,
    CapacityError,
    KvMismatchError,
    KvTransferError,
    KvTransferFailedError,
    WorkerError,
    WorkerLostError,
)
from schemas.frames import Failed, Finished, Timings, TokenLogprobs
from schemas.hop import DecodeRequest, Ok
from schemas.ids import Epoch, WorkerId
from schemas.peer import Stranded
from services.engines.paged.desk import BlocksReserved
from services.engines.paged.handoff import (
    RETRY_GAP_S,
    SETTLE_QUICKLY_S,
    HandoffSite,
    Leg,
    LegNotice,
    record_of,
    seconds_left,
)
from services.engines.paged.peers import Peer
from services.engines.protocol import EngineEvent
from services.kv.mover import Move

_log = logging.getLogger(__name__)

PROMPT_MISMATCH = "prompt_digest"


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The KV is in our blocks and may be used. `timings`: what was waited for from this leg's beginning on."""

    first_token_id: int
    first_logprobs: TokenLogprobs | None
    num_cached_tokens: int
    num_bytes: int
    timings: Timings


class Landing(Protocol):
    """Something that may still write to our blocks."""

    async def settled(self) -> None:
        """Give it up and wait until it is proven that it writes no more."""
        ...


class ReadLanding:
    """Our own READ."""

    def __init__(self, move: Move) -> None:
        self._move = move

    async def settled(self) -> None:
        self._move.cancel()
        await asyncio.shield(self._move.settled)


class WriteLanding:
    """A peer's WRITEs. Its proofs: the peer says that it writes no more (its answer to Stranded), or its process is
    gone. That it is silent, or that discovery lost it, proves nothing: a stopped process may wake up."""

    def __init__(self, site: HandoffSite, peer: Peer, leg: "DecodeLeg") -> None:
        self._site = site
        self._peer = peer
        self._leg = leg

    async def settled(self) -> None:
        error = self._leg.loss or AbortedError("decode has given the attempt up")
        message = Stranded(attempt_id=self._leg.attempt_id, error=error.record())
        gap_s = RETRY_GAP_S
        while not self._peer.process.is_gone():
            try:
                await self._site.link.ask(self._peer.worker, message, Ok, timeout_s=self._site.options.ask_s)
            except BuswayError as refusal:
                _log.debug("%s may still write: %s", self._peer.worker, refusal)
                await asyncio.sleep(gap_s)
                gap_s = min(2 * gap_s, 1.0)
            else:
                return


class DecodeLeg(Leg):
    """A decode leg whose KV comes from `peer_worker`. Subclasses obtain it."""

    def __init__(self, site: HandoffSite, leg: DecodeRequest, peer_worker: WorkerId, peer_epoch: Epoch) -> None:
        super().__init__(site, leg.request)
        self.peer_worker = peer_worker
        self.peer_epoch = peer_epoch
        self.loss: BuswayError | None = None
        self.landing: Landing | None = None
        self.reserved_at = 0.0
        self._began_at = time.monotonic()
        self._late: BuswayError = KvTransferError("the KV didn't come", phase="transfer")
        self._reserved: asyncio.Future[BlocksReserved] = asyncio.get_running_loop().create_future()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask for blocks; raises what the scheduler refuses with, after telling the peer so."""
        try:
            self.site.desk.reserve(self.request)
        except BuswayError as error:
            self._tell_peer(error)
            raise
        self.launch()
        self._keeper = self.site.spawn(self.keep_claim(), f"claim-{self.attempt_id}")

    @abstractmethod
    async def obtain(self) -> Arrival:
        """Get the KV into our blocks, verdict included. Raises BuswayError; `landing` is set while anything writes."""

    @abstractmethod
    async def keep_claim(self) -> None:
        """Keep the peer from letting go, until cancelled; calls `lose` when it has."""

    def lose(self, error: BuswayError) -> None:
        """The KV won't come: `obtain` ends at once."""
        if self.loss is None:
            self.loss = _as_loss(error)
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def reserved(self) -> BlocksReserved:
        """Wait for our blocks; from then on the transfer phase's time runs."""
        reserved = await self._reserved
        self.reserved_at = time.monotonic()
        return reserved

    @property
    def waited_s(self) -> float:
        """Seconds since this leg began."""
        return time.monotonic() - self._began_at

    @property
    def queue_s(self) -> float:
        """Seconds that this leg waited for its blocks."""
        return self.reserved_at - self._began_at

    def limit(self, seconds: float, error: BuswayError) -> None:
        """From now on `obtain` has this long, else it failed with `error`."""
        self._late = error
        if self._scope is not None and self.loss is None:
            self._scope.reschedule(asyncio.get_running_loop().time() + seconds)

    def limit_transfer(self) -> float:
        """Let the transfer phase's time run; return its seconds."""
        seconds, error = seconds_left(self.request, transfer_s=self.site.options.transfer_s)
        self.limit(seconds, error)
        return seconds

    async def run(self) -> None:
        try:
            async with asyncio.timeout(None) as self._scope:
                if self.loss is not None:
                    raise self.loss
                arrival = await self.obtain()
        except TimeoutError:
            error = self.loss or self._late
        except BuswayError as failure:
            error = self.loss or _as_loss(failure)
        else:
            self._begin(arrival)
            return
        self.loss = error
        await self._go_without()

    def close(self) -> None:
        super().close()
        if self._keeper is not None and self._keeper is not asyncio.current_task():
            self._keeper.cancel()

    def notice(self, notice: LegNotice) -> None:
        if isinstance(notice, BlocksReserved) and not self._reserved.done():
            self._reserved.set_result(notice)

    def ended(self, notice: Finished | Failed) -> EngineEvent:
        self.close()
        self._tell_peer(AbortedError("decode ended without prefill's KV"))
        return notice

    def abort(self, error: BuswayError | None) -> None:
        self.close()
        self.loss = self.loss or error
        landing = self.landing
        self.site.desk.abort(self.attempt_id, error=record_of(error), quarantine=landing is not None)
        self._let_go(landing, error or AbortedError("the request was aborted"))

    def stranded(self, error: BuswayError) -> None:
        self.lose(error)

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        if (worker, epoch) == (self.peer_worker, self.peer_epoch):
            self.lose(WorkerLostError(f"prefill worker {worker} is gone", phase="transfer"))

    def _begin(self, arrival: Arrival) -> None:
        self.close()
        site = self.site
        transport = site.mover.transport
        site.totals.num_remote_prefills += 1
        site.totals.kv_transfer_bytes[transport] = site.totals.kv_transfer_bytes.get(transport, 0) + arrival.num_bytes
        site.timings[self.attempt_id] = msgspec.structs.replace(arrival.timings, kv_bytes=arrival.num_bytes)
        site.desk.begin(
            self.attempt_id,
            first_token_id=arrival.first_token_id,
            first_logprobs=arrival.first_logprobs,
            num_cached_tokens=arrival.num_cached_tokens,
        )

    async def _go_without(self) -> None:
        """Recompute or fail as configured; blocks that may still be written to are left in quarantine."""
        error = self.loss or self._late
        landing = self.landing
        if landing is not None and await _settles(landing, SETTLE_QUICKLY_S):
            self.landing = landing = None
        self.close()
        quarantine = landing is not None
        if self._may_recompute(error):
            _log.warning("recomputing a prompt here: %s", error)  # a warning, because floods of these are capped
            self.site.desk.recompute(self.attempt_id, quarantine=quarantine)
        else:
            self.site.desk.abort(self.attempt_id, error=error.record(), quarantine=quarantine)
        self._let_go(landing, error)

    def _may_recompute(self, error: BuswayError) -> bool:
        if self.site.options.kv_load_failure != "recompute":
            return False
        if isinstance(error, KvMismatchError) and error.param == PROMPT_MISMATCH:
            return False
        return isinstance(error, KvTransferError | BusError | WorkerError | CapacityError)

    def _let_go(self, landing: Landing | None, error: BuswayError) -> None:
        self._tell_peer(error)
        if landing is not None:
            self.site.spawn(self._settle(landing), f"settle-{self.attempt_id}")

    async def _settle(self, landing: Landing) -> None:
        await landing.settled()
        self.site.desk.settle(self.attempt_id)

    def _tell_peer(self, error: BuswayError) -> None:
        self.site.spawn(self.site.tell_stranded(self.peer_worker, self.attempt_id, error), "tell-stranded")


def _as_loss(error: BuswayError) -> BuswayError:
    """Return what a peer's word means here: that prefill was given up over there is no abort of the request."""
    if isinstance(error, AbortedError):
        return KvTransferFailedError(f"no KV from prefill: {error.message}", phase="transfer")
    return error


async def _settles(landing: Landing, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await landing.settled()
    except TimeoutError:
        return False
    return True
