"""What a worker's peers may ask of it, and what it answers (schemas.peer). Each answer is idempotent."""

import asyncio
import time

from schemas.errors import (
    AbortedError,
    AckTimeoutError,
    BuswayError,
    LeaseExpiredError,
    RequestError,
    WorkerLostError,
    error_from,
)
from schemas.hop import Ok
from schemas.ids import AttemptId
from schemas.message import Message
from schemas.peer import (
    ConfirmRequest,
    Landed,
    LeaseRequest,
    MeetRequest,
    MetadataRequest,
    Stranded,
    Verdict,
    WriteRequest,
)
from services.engines.paged.handoff import REMEMBER_S, HandoffSite
from services.engines.paged.pull import PullPrefill
from services.engines.paged.rendezvous import MeetDecode, MeetPrefill

SETTLE_S = 0.8


class Answers:
    """Answers peers for the legs of one engine."""

    def __init__(self, site: HandoffSite) -> None:
        self._site = site

    async def answer(self, message: Message) -> Message:
        """Return the answer to a peer's message. Raises BuswayError where the answer is no."""
        match message:
            case MetadataRequest():
                return self._site.peers.introduce(message)
            case LeaseRequest():
                return self._renew(message)
            case ConfirmRequest():
                return self._confirm(message)
            case WriteRequest():
                return await self._write(message)
            case MeetRequest():
                return self._meet(message)
            case Landed():
                return self._landed(message)
            case Stranded():
                return await self._stranded(message)
            case _:
                raise RequestError(f"no engine answers {type(message).__name__}")

    def _renew(self, message: LeaseRequest) -> Verdict:
        if message.epoch != self._site.peers.epoch:
            return _no(WorkerLostError("that lease was another epoch's"))
        leg = self._site.legs.get(message.attempt_id)
        if isinstance(leg, MeetPrefill):
            leg.wait_longer(message.lease_s)
            return Verdict(is_good=True)
        state = self._site.leases.renew(message.attempt_id, lease_s=message.lease_s, now=time.monotonic())
        if state in ("held", "confirmed"):
            return Verdict(is_good=True)
        return Verdict(is_good=False) if state == "unknown" else self._over(message.attempt_id)

    def _confirm(self, message: ConfirmRequest) -> Verdict:
        if message.epoch != self._site.peers.epoch:
            return _no(WorkerLostError("that lease was another epoch's"))
        is_good = self._site.leases.confirm(message.attempt_id, time.monotonic())
        leg = self._site.legs.get(message.attempt_id)
        if isinstance(leg, PullPrefill):
            leg.lease_ended()
        return Verdict(is_good=True) if is_good else self._over(message.attempt_id)

    async def _write(self, message: WriteRequest) -> Verdict:
        leg = self._site.legs.get(message.ticket.attempt_id)
        if message.ticket.epoch != self._site.peers.epoch or not isinstance(leg, PullPrefill):
            raise LeaseExpiredError("the KV is no longer the request's")
        return await leg.write(message)

    def _meet(self, message: MeetRequest) -> Verdict:
        """A room that isn't known yet is no refusal: the legs arrive in either order, decode asks again."""
        if message.epoch != self._site.peers.epoch:
            return _no(WorkerLostError("that room was another epoch's"))
        leg = self._site.legs.get(message.attempt_id)
        if isinstance(leg, MeetPrefill):
            return leg.meet(message)
        state = self._site.leases.state(message.attempt_id, time.monotonic())
        return Verdict(is_good=False) if state == "unknown" else self._over(message.attempt_id)

    def _landed(self, message: Landed) -> Ok:
        leg = self._site.legs.get(message.attempt_id)
        if isinstance(leg, MeetDecode):
            leg.landed(message)
            self._site.landed[message.attempt_id] = time.monotonic() + REMEMBER_S
        elif message.attempt_id not in self._site.landed:
            raise AbortedError("decode has given the attempt up")
        return Ok()

    async def _stranded(self, message: Stranded) -> Ok:
        """End our leg. Ok means that nothing of ours will write to the peer's blocks any more.

        Remembered: a leg or a message of this attempt that comes later is refused.
        """
        site, now = self._site, time.monotonic()
        leg = site.legs.get(message.attempt_id)
        site.leases.revoke(message.attempt_id, now, remember_until=now + REMEMBER_S)
        if leg is not None:
            leg.stranded(error_from(message.error))
        try:
            async with asyncio.timeout(SETTLE_S):
                await site.writes_settled(message.attempt_id)
        except TimeoutError:
            raise AckTimeoutError("a write hasn't settled") from None
        return Ok()

    def _over(self, attempt_id: AttemptId) -> Verdict:
        state = self._site.leases.state(attempt_id, time.monotonic())
        if state == "revoked":
            return _no(AbortedError("prefill has given the attempt up"))
        return _no(LeaseExpiredError(f"the KV is no longer the request's: its lease is {state}"))


def _no(error: BuswayError) -> Verdict:
    return Verdict(is_good=False, error=error.record())
