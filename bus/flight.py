"""One request in flight: the shell around its life. Keeps what nobody has taken yet, and the timer."""

import asyncio
import contextvars
import time
from collections.abc import Callable

from bus.life import Life
from bus.life_events import AbortAt, AskResend, CallerClosed, Deliver, End, Event, FrameCame, Send, TimerFired
from schemas.errors import BuswayError
from schemas.frames import Frame
from schemas.ids import AttemptId

Order = Send | AskResend | AbortAt
OnSend = Callable[[AttemptId, str], None]


def unheard(attempt_id: AttemptId, reason: str) -> None:
    """Nobody wants to know of attempts."""


class Flight:
    """Made by bus.client for each request: events come by `handle`, the caller takes `next_frames`. Orders that need
    the bus go to `carry_out`. `attempt_id` is the one sent last, `on_send` is told of each; tasks for this request run
    in its `context`, whosever event it was."""

    def __init__(self, life: Life, carry_out: Callable[["Flight", Order], None], on_send: OnSend = unheard) -> None:
        self.life = life
        self.attempt_id = life.attempt.id
        self.on_send = on_send
        self.context = contextvars.copy_context()
        self._carry_out = carry_out
        self._frames: list[Frame] = []
        self._error: BuswayError | None = None
        self._waker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """All of it has been taken, and it ended well."""
        return self.life.is_over and not self._frames and self._error is None

    def start(self) -> None:
        """Send it."""
        self._carry(self.life.start(time.time()))
        self._arm()

    def handle(self, event: Event) -> None:
        """Take what happened."""
        state = self.life.state
        self._carry(self.life.handle(event, time.time()))
        # As long as the state stays, frames only move the alarm back: it fires early, looks, and is set again.
        if self.life.state != state or not isinstance(event, FrameCame):
            self._arm()

    def close(self) -> list[AbortAt]:
        """Give it up, if it isn't over; return who is to be told."""
        orders = self.life.handle(CallerClosed(), time.time())
        self._disarm()
        return [order for order in orders if isinstance(order, AbortAt)]

    async def next_frames(self) -> list[Frame]:
        """Return the frames that arrived since the last call, at least one; raises what ended the flight."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        frames, self._frames = self._frames, []
        return frames

    def _carry(self, instructions: list[Deliver | End | Order]) -> None:
        for instruction in instructions:
            match instruction:
                case Deliver(frame):
                    self._frames.append(frame)
                    self._wake()
                case End(error):
                    self._error = error
                    self._wake()
                case _:
                    self._carry_out(self, instruction)

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _arm(self) -> None:
        self._disarm()
        wake_at = self.life.wake_at
        if wake_at is not None:
            delay_s = max(0.0, wake_at - time.time())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.handle, TimerFired())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
