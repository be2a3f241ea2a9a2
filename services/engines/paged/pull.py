"""Handoff after prefill: prefill keeps the prompt's blocks under a lease, decode fetches them by its ticket.

Prefill: hold -> computed -> lease and ticket -> (decode reads, or asks us to write) -> confirmed -> free.
Decode: reserve -> (renew the lease while waiting) -> blocks -> fetch -> confirm -> only then the KV is used.
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
    KvTransferError,
    KvTransferFailedError,
    LeaseExpiredError,
    NoRespondersError,
    error_from,
)
from schemas.frames import Timings
from schemas.handoff import KvTicket
from schemas.hop import DecodeRequest, PrefillDone, PrefillEnded, PrefillRequest
from schemas.ids import Epoch, WorkerId
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict, WriteRequest
from services.engines.paged.decode_leg import Arrival, DecodeLeg, ReadLanding, WriteLanding
from services.engines.paged.desk import PromptComputed
from services.engines.paged.handoff import REMEMBER_S, RETRY_GAP_S, HandoffSite, LegNotice
from services.engines.paged.peers import Peer
from services.engines.paged.prefill_leg import PrefillLeg, moved
from services.engines.prompt import num_prompt_tokens
from services.kv.mover import Move
from services.kv.plan import BlockMoves, block_moves, num_blocks_for

FIRST_RENEWAL_S = 0.25


class PullPrefill(PrefillLeg):
    """Computes a prompt and keeps it for whoever has the ticket, as long as the lease is held."""

    def __init__(self, site: HandoffSite, leg: PrefillRequest) -> None:
        super().__init__(site, leg.request)
        self._is_computed: asyncio.Future[PromptComputed] = asyncio.get_running_loop().create_future()
        self._lease_ended = asyncio.Event()
        self._write: tuple[WriteRequest, Move] | None = None

    def start(self) -> None:
        """Queue the prompt; raises what the scheduler refuses with."""
        self.site.desk.hold(self.request, report_chunks=False)
        self.launch()

    def notice(self, notice: LegNotice) -> None:
        if isinstance(notice, PromptComputed) and not self._is_computed.done():
            self.note_computed(notice)
            self._is_computed.set_result(notice)

    async def run(self) -> None:
        computed = await self._is_computed
        if computed.finish_reason is not None:
            self.close()
            self.emit_result(
                PrefillEnded(
                    attempt_id=self.attempt_id,
                    token_id=computed.first_token_id,
                    reason=computed.finish_reason,
                    num_cached_tokens=computed.num_cached_tokens,
                    logprobs=computed.first_logprobs,
                    timings=self.timings(),
                )
            )
            return
        await self.site.pauses.wait("before_ticket", self.attempt_id)
        ticket = self._grant(computed)
        self.emit_result(PrefillDone(attempt_id=self.attempt_id, params=ticket, timings=self.timings()))
        await self._end_of_lease()
        self.free()

    def lease_ended(self) -> None:
        """The lease was confirmed or revoked: free the blocks."""
        self._lease_ended.set()

    def yield_to_decode(self) -> None:
        self.free()

    def tell_peer(self, error: BuswayError) -> None:
        """Whoever holds the ticket learns it from the lease: we don't know who that is."""

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """The lease takes care of that."""

    async def write(self, order: WriteRequest) -> Verdict:
        """WRITE the ordered blocks into decode's; answers when nothing more will be written.

        Raises KvTransferError when they didn't all land, AckTimeoutError when some may still be landing.
        """
        if self._write is None:
            peer = await self.site.peers.connect(order.decode_worker, order.decode_epoch)
        if self._write is None:  # nobody else has begun it meanwhile
            self._begin_write(order, peer)
            await self.site.pauses.wait("mid_transfer", self.attempt_id)
        if self._write is None or self._write[0] != order:
            raise KvTransferFailedError("another write of these blocks is under way")
        move = self._write[1]
        try:
            result = await asyncio.shield(move.result)
        except BuswayError:
            await _settled_soon(move, self.site.options.ask_s)
            raise
        return Verdict(is_good=True, num_bytes=result.num_bytes, seconds=result.seconds)

    def _begin_write(self, order: WriteRequest, peer: Peer) -> None:
        """Start the move. From the check of the lease to the start nothing else gets to run."""
        computed = self.computed
        if computed is None or not self.is_open or self.site.leases.state(self.attempt_id, time.monotonic()) != "held":
            raise LeaseExpiredError("the KV is no longer the request's")
        source = order.ticket.block_ids
        if len(source) != len(order.block_ids) or not set(source) <= set(computed.block_ids):
            raise KvMismatchError("the ordered blocks aren't this attempt's")
        moves = block_moves(source, order.block_ids, first=0, last=len(source))
        seconds = min(order.deadline - time.time(), self.site.options.transfer_s)
        move = self.site.mover.move("write", peer.name, moves.source, moves.target, deadline=time.monotonic() + seconds)
        self._write = (order, move)
        self._moves.append(move)

    def _grant(self, computed: PromptComputed) -> KvTicket:
        site, now = self.site, time.monotonic()
        lease_s = site.options.lease_s
        site.leases.grant(self.attempt_id, lease_s=lease_s, now=now, remember_until=now + REMEMBER_S)
        return KvTicket(
            attempt_id=self.attempt_id,
            prefill_worker=site.peers.worker,
            epoch=site.peers.epoch,
            block_ids=computed.block_ids,
            num_tokens=computed.num_tokens,
            layout=site.peers.agent.layout,
            lease_s=lease_s,
            first_token_id=computed.first_token_id,
            first_logprobs=computed.first_logprobs,
            num_cached_tokens=computed.num_cached_tokens,
        )

    async def _end_of_lease(self) -> None:
        leases = self.site.leases
        while leases.state(self.attempt_id, time.monotonic()) == "held":
            expires_at = leases.expires_at(self.attempt_id)
            try:
                async with asyncio.timeout((expires_at or 0.0) - time.monotonic()):
                    await self._lease_ended.wait()
            except TimeoutError:
                continue  # renewed meanwhile, or expired: the table judges


class PullDecode(DecodeLeg):
    """Fetches a ticket's blocks, by READ or by asking for a WRITE, and asks for the verdict before their use."""

    def __init__(self, site: HandoffSite, leg: DecodeRequest, ticket: KvTicket) -> None:
        super().__init__(site, leg, ticket.prefill_worker, ticket.epoch)
        self._ticket = ticket

    async def keep_claim(self) -> None:
        """Renew the lease every third of it, as long as this leg is open."""
        lease_s = self._ticket.lease_s
        question = LeaseRequest(attempt_id=self.attempt_id, epoch=self.peer_epoch, lease_s=lease_s)
        gap_s = min(lease_s / 3, FIRST_RENEWAL_S)
        while True:
            await asyncio.sleep(gap_s)
            gap_s = lease_s / 3
            try:
                verdict = await self.site.link.ask(self.peer_worker, question, Verdict, timeout_s=min(gap_s, 1.0))
            except (KvTransferError, *_UNREACHABLE):
                gap_s = min(gap_s, RETRY_GAP_S * 4)  # the lease goes on as long as prefill's clock says
                continue
            if not verdict.is_good:
                self.lose(_refusal(verdict))
                return

    async def obtain(self) -> Arrival:
        ticket = self._ticket
        self._check_ticket()
        reserved = await self.reserved()
        self.limit_transfer()
        num_blocks = num_blocks_for(ticket.num_tokens, self.site.block_size)
        moves = block_moves(ticket.block_ids, reserved.block_ids, first=reserved.num_cached_blocks, last=num_blocks)
        num_bytes = await self._fetch(moves) if len(moves) else 0
        await self.site.pauses.wait("before_confirm", self.attempt_id)
        await self._confirm()
        seconds = time.monotonic() - self.reserved_at
        if num_bytes:
            self.site.totals.fetched(len(moves) * self.site.block_size, seconds)
        return Arrival(
            first_token_id=ticket.first_token_id,
            first_logprobs=ticket.first_logprobs,
            num_cached_tokens=ticket.num_cached_tokens,
            num_bytes=num_bytes,
            timings=Timings(decode_queue_s=self.queue_s, transfer_s=seconds),
        )

    def _check_ticket(self) -> None:
        ticket = self._ticket
        if ticket.attempt_id != self.attempt_id:
            raise KvMismatchError("the ticket is another attempt's")
        if ticket.layout != self.site.peers.agent.layout:
            raise KvMismatchError(f"the ticket's KV layout is {ticket.layout}, ours {self.site.peers.agent.layout}")
        if ticket.num_tokens != num_prompt_tokens(self.request):
            raise KvMismatchError(f"the ticket holds {ticket.num_tokens} tokens, the prompt another number")

    async def _fetch(self, moves: BlockMoves) -> int:
        peer = await self.site.peers.connect(self.peer_worker, self.peer_epoch)
        if self._reads(peer):
            return await self._read(peer, moves)
        return await self._order_write(peer, moves)

    def _reads(self, peer: Peer) -> bool:
        fetch = self.site.options.fetch
        if fetch == "auto":
            return peer.host_id == self.site.peers.agent.host_id
        return fetch == "read"

    async def _read(self, peer: Peer, moves: BlockMoves) -> int:
        deadline = time.monotonic() + self.site.options.transfer_s
        move = self.site.mover.move("read", peer.name, moves.target, moves.source, deadline=deadline)
        self.landing = ReadLanding(move)
        await self.site.pauses.wait("mid_transfer", self.attempt_id)
        num_bytes = await moved([move])
        self.landing = None
        return num_bytes

    async def _order_write(self, peer: Peer, moves: BlockMoves) -> int:
        seconds = self.limit_transfer()
        order = WriteRequest(
            ticket=msgspec.structs.replace(self._ticket, block_ids=tuple(moves.source.tolist())),
            decode_worker=self.site.peers.worker,
            decode_epoch=self.site.peers.epoch,
            block_ids=tuple(moves.target.tolist()),
            deadline=time.time() + seconds,
        )
        self.landing = WriteLanding(self.site, peer, self)
        try:
            verdict = await self.site.link.ask(self.peer_worker, order, Verdict, timeout_s=seconds)
        except (AckTimeoutError, BusUnavailableError):
            raise  # no answer: it may still be writing
        except BuswayError:
            self.landing = None
            raise
        self.landing = None
        if not verdict.is_good:
            raise _refusal(verdict)
        return verdict.num_bytes

    async def _confirm(self) -> None:
        """Return when prefill says that the lease was held throughout; asked again until it answers."""
        question = ConfirmRequest(attempt_id=self.attempt_id, epoch=self.peer_epoch)
        while True:
            try:
                verdict = await self.site.link.ask(
                    self.peer_worker, question, Verdict, timeout_s=self.site.options.ask_s
                )
            except (*_UNREACHABLE, CapacityError):
                await asyncio.sleep(RETRY_GAP_S)
                continue
            if not verdict.is_good:
                raise _refusal(verdict)
            return


_UNREACHABLE = (AckTimeoutError, NoRespondersError, BusUnavailableError)


def _refusal(verdict: Verdict) -> BuswayError:
    return error_from(verdict.error) if verdict.error else LeaseExpiredError("the KV is no longer the request's")


async def _settled_soon(move: Move, within_s: float) -> None:
    """Wait for a failed move to settle; raises AckTimeoutError, which promises nothing, when it doesn't."""
    try:
        async with asyncio.timeout(within_s):
            await asyncio.shield(move.settled)
    except TimeoutError:
        raise AckTimeoutError("the write hasn't settled") from None
