"""Asks a prefill worker for its outcome when nothing has been heard for long: core NATS may lose the one message that a
request waits for, and a lease ends without a word.
"""

import asyncio
import random
from collections.abc import Callable

from bus.connection import Bus
from schemas.errors import AckTimeoutError, BusUnavailableError, BuswayError, NoRespondersError
from schemas.hop import AcceptedHop, Resend
from schemas.ids import AttemptId, WorkerId

SILENCE_S = 2.0
MAX_SILENCE_S = 30.0
AGAIN_S = 1.0
MAX_UNANSWERED = 2


class ResultWatch:
    """One request's, from `start` to `stop`; nothing but a timer until it fires.

    `awaited_from` names the worker whose outcome is all that is waited for, if so. `on_lost` is called when that one
    knows nothing of the leg, or has twice not answered.
    """

    def __init__(
        self,
        bus: Bus,
        attempt_id: AttemptId,
        *,
        awaited_from: Callable[[], WorkerId | None],
        on_lost: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._attempt_id = attempt_id
        self._awaited_from = awaited_from
        self._on_lost = on_lost
        self._silence_s = SILENCE_S
        self._num_unanswered = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look after a while, and again."""
        self._arm(self._silence_s)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        delay_s *= random.uniform(1.0, 1.25)  # after a restart of NATS many wait at once
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        worker = self._awaited_from()
        if worker is None:
            self._arm(self._silence_s)
        else:
            self._bus.spawn(self._ask(worker), "ask for a prefill's outcome")

    async def _ask(self, worker: WorkerId) -> None:
        resend = Resend(attempt_id=self._attempt_id, from_seq=0)
        try:
            await self._bus.ask(self._bus.subjects.worker(worker, "resend"), resend, AcceptedHop)
        except BusUnavailableError:
            self._num_unanswered = 0
        except (AckTimeoutError, NoRespondersError):
            self._num_unanswered += 1
        except BuswayError:
            self._num_unanswered = MAX_UNANSWERED
        else:
            self._num_unanswered = 0
            self._silence_s = min(2 * self._silence_s, MAX_SILENCE_S)
        if self._timer is None:
            return  # stopped meanwhile
        if self._num_unanswered >= MAX_UNANSWERED:
            self._on_lost()
        else:
            self._arm(AGAIN_S if self._num_unanswered else self._silence_s)
