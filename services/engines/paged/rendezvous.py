"""Handoff by rendezvous: decode hands over its blocks, prefill WRITEs each chunk's KV while it computes the next.

Prefill: hold -> chunks computed, decode met (in either order) -> write what is complete -> landed -> free.
Decode: reserve -> blocks -> meet -> landed -> decode. While it queues it keeps prefill waiting by LeaseRequest.
"""

import asyncio
import time

import msgspec

from schemas.errors import (
    AckTimeoutError,
    BusUnavailableError,
    BuswayError,
    CapacityError,
    KvMismatchError,
    KvTransferFailedError,
    LeaseExpiredError,
    NoRespondersError,
    UnavailableError,
    WorkerLostError,
    error_from,
)
from schemas.frames import Timings
from schemas.handoff import BootstrapInfo
from schemas.hop import DecodeRequest, Ok, PrefillDone, PrefillRequest
from schemas.ids import Epoch, WorkerId
from schemas.peer import Landed, LeaseRequest, MeetRequest, Verdict
from services.engines.paged.decode_leg import PROMPT_MISMATCH, Arrival, DecodeLeg, WriteLanding
from services.engines.paged.desk import BlocksReserved, ChunkComputed, PromptComputed
from services.engines.paged.handoff import (
    RETRY_GAP_S,
    HandoffSite,
    LegNotice,
    seconds_left,
)
from services.engines.paged.peers import Peer
from services.engines.paged.prefill_leg import PrefillLeg, moved
from services.engines.prompt import num_prompt_tokens, prompt_digest
from services.kv.mover import Moved
from services.kv.plan import block_moves, num_blocks_for, num_ready_blocks
from services.phase_timings import fitted, waited_for

_UNREACHABLE = (AckTimeoutError, NoRespondersError, BusUnavailableError)
STARVED_S = 0.5


class MeetPrefill(PrefillLeg):
    """Delivers a prompt's KV into the blocks of the decode leg that shows up in its room."""

    def __init__(self, site: HandoffSite, leg: PrefillRequest, bootstrap: BootstrapInfo) -> None:
        super().__init__(site, leg.request)
        self._bootstrap = bootstrap
        self._decode_worker = leg.decode_worker
        self._progress: ChunkComputed | PromptComputed | None = None
        self._meet: MeetRequest | None = None
        self._met_at = 0.0
        self._wake = asyncio.Event()
        self._num_written_blocks = 0
        self._late: BuswayError = KvTransferFailedError("the KV wasn't delivered", phase="transfer")

    def start(self) -> None:
        """Queue the prompt; raises what the scheduler refuses with, UnavailableError for another epoch's room."""
        if self._bootstrap.epoch != self.site.peers.epoch or self._bootstrap.prefill_worker != self.site.peers.worker:
            raise UnavailableError("that room is of another worker or epoch")
        try:
            self.site.desk.hold(self.request, report_chunks=True)
        except BuswayError as error:
            self.tell_peer(error)
            raise
        self.launch()

    def notice(self, notice: LegNotice) -> None:
        if isinstance(notice, BlocksReserved):
            return
        self._progress = notice
        if isinstance(notice, PromptComputed):
            self.note_computed(notice)
        self._wake.set()

    def meet(self, request: MeetRequest) -> Verdict:
        """Note decode's blocks. Asked again (a lost answer, a sign of life) it says the same."""
        try:
            self._check(request)
        except BuswayError as error:
            return Verdict(is_good=False, error=error.record())
        self._met_at = self._met_at or time.monotonic()
        self._meet = request
        self._decode_worker = request.decode_worker
        self._wake.set()
        return Verdict(is_good=True)

    def wait_longer(self, lease_s: float) -> None:
        """Decode queues and will come: wait this long for it from now on."""
        if self.is_unmet:
            self._limit(min(lease_s, self.site.options.lease_s), LeaseExpiredError("decode didn't come for the KV"))

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        meet = self._meet
        if meet is not None and (meet.decode_worker, meet.decode_epoch) == (worker, epoch):
            self.abort(WorkerLostError(f"decode worker {worker} is gone", phase="transfer"))

    def tell_peer(self, error: BuswayError) -> None:
        if self._decode_worker is not None:
            site = self.site
            site.spawn(site.tell_stranded(self._decode_worker, self.attempt_id, error), "tell-stranded")

    def yield_to_decode(self) -> None:
        self.free()
        self.emit_result(PrefillDone(attempt_id=self.attempt_id, params=self._bootstrap, timings=self.timings()))

    async def run(self) -> None:
        try:
            async with asyncio.timeout(None) as self._scope:
                await self._deliver()
        except TimeoutError:
            self.abort(self._late)
        except BuswayError as error:
            self.abort(error)
        else:
            self.free()
            self.emit_result(PrefillDone(attempt_id=self.attempt_id, params=self._bootstrap, timings=self.timings()))

    async def _deliver(self) -> None:
        began_s = 0.0
        peer: Peer | None = None
        num_blocks = num_blocks_for(num_prompt_tokens(self.request), self.site.block_size)
        while self.computed is None or peer is None or self._num_written_blocks < num_blocks:
            await self._news()
            if self._meet is None:
                self.wait_longer(self.site.options.lease_s)
                continue
            if peer is None:
                self._limit_transfer(self._meet)
                peer = await self.site.peers.connect(self._meet.decode_worker, self._meet.decode_epoch)
            began_s = began_s or time.monotonic()
            self._write_ready_blocks(peer, self._meet)
            await self.site.pauses.wait("mid_transfer", self.attempt_id)
        if self._meet is None:
            raise KvTransferFailedError("delivered to nobody")
        self._limit_transfer(self._meet)
        num_bytes = await moved(self._moves)
        await self._tell_landed(self.computed, self._meet, num_bytes, began_s)

    async def _news(self) -> None:
        """Wait until decode has met or more is computed; starved of blocks meanwhile, take some back."""
        while not self._wake.is_set():
            is_awaited = self._meet is not None and self._progress is None
            try:
                async with asyncio.timeout(STARVED_S if is_awaited else None):
                    await self._wake.wait()
            except TimeoutError:
                _take_back_blocks(self.site)
        self._wake.clear()

    @property
    def is_unmet(self) -> bool:
        """Whether the prompt is computed and decode hasn't shown up: nobody else knows of its blocks."""
        return self.computed is not None and self._meet is None

    def compute_again(self) -> None:
        """Give the blocks of an unmet prompt up and queue behind the others."""
        self.computed = self._progress = None
        if self._scope is not None:
            self._scope.reschedule(None)
        self.site.desk.abort(self.attempt_id)
        self.site.desk.hold(self.request, report_chunks=True)

    def _check(self, request: MeetRequest) -> None:
        if request.epoch != self.site.peers.epoch or request.room != self._bootstrap.room:
            raise WorkerLostError("that room is of another epoch or attempt")
        if request.prompt_digest != prompt_digest(self.request):
            raise KvMismatchError("the two legs' prompts differ", param=PROMPT_MISMATCH)
        num_blocks = num_blocks_for(num_prompt_tokens(self.request), self.site.block_size)
        if request.skip_blocks + len(request.block_ids) != num_blocks or request.skip_blocks < 0:
            raise KvMismatchError(f"the prompt has {num_blocks} blocks, decode means other ones")
        if self._meet is not None and (self._meet.decode_worker, self._meet.decode_epoch, self._meet.block_ids) != (
            request.decode_worker,
            request.decode_epoch,
            request.block_ids,
        ):
            raise KvMismatchError("another decode leg is in that room")

    def _write_ready_blocks(self, peer: Peer, meet: MeetRequest) -> None:
        """Post the blocks that won't change any more and haven't been posted."""
        progress = self._progress
        if progress is None:
            return
        num_tokens = num_prompt_tokens(self.request)
        num_computed = progress.num_computed_tokens if isinstance(progress, ChunkComputed) else num_tokens
        last = num_ready_blocks(num_computed, num_tokens, self.site.block_size)
        moves = block_moves(
            progress.block_ids,
            meet.block_ids,
            first=self._num_written_blocks,
            last=last,
            num_skipped_in_target=meet.skip_blocks,
        )
        self._num_written_blocks = max(last, self._num_written_blocks)
        if len(moves):
            deadline = time.monotonic() + self.site.options.transfer_s
            move = self.site.mover.move("write", peer.name, moves.source, moves.target, deadline=deadline)
            move.result.add_done_callback(self._on_moved)
            self._moves.append(move)

    def _on_moved(self, result: "asyncio.Future[Moved]") -> None:
        """A failed write ends the leg at once, not only when the prompt is done."""
        error = result.exception()
        if isinstance(error, BuswayError) and self.is_open:
            self.abort(error)

    async def _tell_landed(self, computed: PromptComputed, meet: MeetRequest, num_bytes: int, began_s: float) -> None:
        """Return when decode has taken note; it is told again until it answers."""
        now, timings, ready_at = time.monotonic(), self.timings(), max(self.computed_at, self._met_at)
        message = Landed(
            attempt_id=self.attempt_id,
            room=self._bootstrap.room,
            first_token_id=computed.first_token_id,
            first_logprobs=computed.first_logprobs,
            num_cached_tokens=computed.num_cached_tokens,
            num_bytes=num_bytes,
            transfer_s=now - began_s,
            last_transfer_s=now - ready_at,
            decode_wait_s=ready_at - self.computed_at,
            prefill_queue_s=timings.prefill_queue_s,
            prefill_s=timings.prefill_s,
        )
        while True:
            try:
                await self.site.link.ask(meet.decode_worker, message, Ok, timeout_s=self.site.options.ask_s)
            except _UNREACHABLE:
                await asyncio.sleep(RETRY_GAP_S)
            else:
                return

    def _limit_transfer(self, meet: MeetRequest) -> None:
        if self.computed is not None:
            seconds, error = seconds_left(self.request, transfer_s=self.site.options.transfer_s)
            if meet.deadline:
                seconds = min(seconds, max(0.0, meet.deadline - time.time()))
            self._limit(seconds, error)

    def _limit(self, seconds: float, error: BuswayError) -> None:
        self._late = error
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time() + seconds)


class MeetDecode(DecodeLeg):
    """Hands its blocks to prefill and waits until the prompt's KV has landed in them."""

    def __init__(self, site: HandoffSite, leg: DecodeRequest, bootstrap: BootstrapInfo) -> None:
        super().__init__(site, leg, bootstrap.prefill_worker, bootstrap.epoch)
        self._bootstrap = bootstrap
        self._meet: MeetRequest | None = None
        self._landed: asyncio.Future[Landed] = asyncio.get_running_loop().create_future()

    def landed(self, message: Landed) -> None:
        """Take prefill's word that everything has landed. Raises KvMismatchError for another room."""
        if message.room != self._bootstrap.room:
            raise KvMismatchError("that isn't this attempt's room")
        if not self._landed.done():
            self._landed.set_result(message)

    async def keep_claim(self) -> None:
        """Show prefill that we are alive and that we want it to be: it answers with an error when our leg is over."""
        lease_s = self.site.options.lease_s
        renewal = LeaseRequest(attempt_id=self.attempt_id, epoch=self.peer_epoch, lease_s=lease_s)
        silent_since: float | None = None
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                verdict = await self.site.link.ask(
                    self.peer_worker, self._meet or renewal, Verdict, timeout_s=self.site.options.ask_s
                )
            except BuswayError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > self.site.options.transfer_s:
                    self.lose(error)
                    return
                continue
            silent_since = None
            if verdict.error is not None and not self._landed.done():
                self.lose(error_from(verdict.error))
                return

    async def obtain(self) -> Arrival:
        reserved = await self.reserved()
        peer = await self._connected()
        self._limit_wait()
        self.landing = WriteLanding(self.site, peer, self)
        await self._meet_prefill(reserved)
        landed = await self._landed
        self.landing = None
        return Arrival(
            first_token_id=landed.first_token_id,
            first_logprobs=landed.first_logprobs,
            num_cached_tokens=landed.num_cached_tokens,
            num_bytes=landed.num_bytes,
            timings=as_waited_for(landed, self.waited_s),
        )

    async def _connected(self) -> Peer:
        self.limit_transfer()
        return await self.site.peers.connect(self.peer_worker, self.peer_epoch)

    def _limit_wait(self) -> None:
        """Prefill may queue and compute for long; that it lives is watched by keep_claim."""
        seconds, error = seconds_left(self.request, transfer_s=self.site.options.rendezvous_s)
        self.limit(seconds, error)

    async def _meet_prefill(self, reserved: BlocksReserved) -> None:
        """Hand over the blocks; prefill's leg may come later than ours, then it is asked again."""
        skip_blocks = reserved.num_cached_blocks
        num_tokens = num_prompt_tokens(self.request)
        num_blocks = num_blocks_for(num_tokens, self.site.block_size)
        self._meet = request = MeetRequest(
            attempt_id=self.attempt_id,
            room=self._bootstrap.room,
            epoch=self.peer_epoch,
            decode_worker=self.site.peers.worker,
            decode_epoch=self.site.peers.epoch,
            num_tokens=num_tokens,
            prompt_digest=prompt_digest(self.request),
            block_ids=reserved.block_ids[skip_blocks:num_blocks],
            skip_blocks=skip_blocks,
        )
        while not self._landed.done():
            try:
                verdict = await self.site.link.ask(
                    self.peer_worker, request, Verdict, timeout_s=self.site.options.ask_s
                )
            except (*_UNREACHABLE, CapacityError):
                await asyncio.sleep(RETRY_GAP_S)
                continue
            if verdict.is_good or self._landed.done():  # prefill's leg is over once we have taken note
                return
            if verdict.error is not None:
                raise error_from(verdict.error)
            await asyncio.sleep(RETRY_GAP_S)


def as_waited_for(landed: Landed, waited_s: float) -> Timings:
    """Return what decode waited for, by prefill's account: prefill had begun earlier, and what passed between its last
    word and our hearing it was transfer."""
    told = Timings(
        prefill_queue_s=landed.prefill_queue_s,
        prefill_s=landed.prefill_s,
        decode_queue_s=landed.decode_wait_s,
        transfer_s=landed.last_transfer_s,
        overlap_s=max(0.0, landed.transfer_s - landed.last_transfer_s),
    )
    told = fitted(told, waited_s)
    return msgspec.structs.replace(told, transfer_s=told.transfer_s + max(0.0, waited_s - waited_for(told)))


def _take_back_blocks(site: HandoffSite) -> None:
    """Let the newest prompt that is computed and not yet met queue anew, when nothing can run for lack of blocks.

    Its decode leg may be queueing for blocks that another leg keeps for a prompt that queues here: neither would ever
    get on.
    """
    load = site.desk.load()
    if load.running or not load.waiting:
        return
    for leg in reversed(list(site.legs.values())):
        if isinstance(leg, MeetPrefill) and leg.is_unmet:
            leg.compute_again()
            return
