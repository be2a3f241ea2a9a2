"""Keeps the lease on a ticket's blocks alive while the router holds the ticket: from prefill's result until decode has
acked, and renews it itself.
"""

import asyncio
import logging

from bus.connection import Bus
from schemas.errors import BuswayError
from schemas.handoff import DisaggregatedParams, KvTicket
from schemas.peer import LeaseRequest, Verdict

logger = logging.getLogger(__name__)

RENEWALS_A_LEASE = 3


class LeaseKeeper:
    """One request's, from `keep` to `stop`. What prefill says is decode's to judge: nothing is made of it here."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ticket: KvTicket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, params: DisaggregatedParams | None) -> None:
        """Renew the lease of a ticket from now on; other params have none, and a second call changes nothing."""
        if isinstance(params, KvTicket) and self._ticket is None:
            self._ticket = params
            self._arm(params)

    def stop(self) -> None:
        """Renew no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, ticket: KvTicket) -> None:
        delay_s = ticket.lease_s / RENEWALS_A_LEASE
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._renew, ticket)

    def _renew(self, ticket: KvTicket) -> None:
        self._bus.spawn(self._ask(ticket), "renew a lease")
        self._arm(ticket)

    async def _ask(self, ticket: KvTicket) -> None:
        request = LeaseRequest(attempt_id=ticket.attempt_id, epoch=ticket.epoch, lease_s=ticket.lease_s)
        subject = self._bus.subjects.peer(ticket.prefill_worker, "lease")
        try:
            await self._bus.ask(subject, request, Verdict, timeout_s=min(1.0, ticket.lease_s))
        except BuswayError as error:
            logger.debug("lease of %s not renewed: %s", ticket.attempt_id, error.message)
