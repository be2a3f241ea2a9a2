"""One attempt in flight at its owner: the reader, what it delivered and nobody has taken yet, and its timer.

Before the first token only the request's deadlines and the loss of its holder end a flight; from then on silence
breaks the stream (Patience).
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from bus.deadlines import late, next_due
from bus.stream import StreamReader
from schemas.errors import BuswayError, WorkerLostError, error_from
from schemas.frames import Failed, Finished, Frame
from schemas.request import GenerateRequest

LOST_HOLDER_GRACE_S = 0.5

_End = tuple[float, Callable[[], BuswayError]]


class Patience(NamedTuple):
    """How long a stream may be silent once it has begun: usually, and after frames may have been lost (a slow
    consumer's drop, a reconnect)."""

    silence_s: float = 30.0
    suspect_silence_s: float = 5.0


class Flight:
    """Made by bus.client for each attempt: `feed` comes from the subscription, `next_frames` from the caller.

    `has_heard`: some frame has arrived. `has_terminal`: Finished or Failed has, so nobody holds the attempt now.
    """

    def __init__(self, request: GenerateRequest, patience: Patience) -> None:
        self.request = request
        self.reader = StreamReader(request.attempt_id, num_resumed=len(request.resume))
        self.has_heard = False
        self.has_terminal = False
        self._patience = patience
        self._frames: list[Frame] = []
        self._error: BuswayError | None = None
        self._waker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = time.time()
        self._suspect_at: float | None = None
        self._lost_at: float | None = None
        self._arm()

    @property
    def is_over(self) -> bool:
        """All of it has been taken, and it ended well."""
        return self.reader.is_closed and not self._frames and self._error is None

    @property
    def workers(self) -> list[str]:
        """The workers that have said they hold this attempt."""
        reader = self.reader
        return list(dict.fromkeys(worker for worker in (reader.prefill_worker, reader.decode_worker) if worker))

    def feed(self, frame: Frame, *, is_backlog: bool = False) -> None:
        """Take a frame from the wire; one of the backlog came before a loss and doesn't clear suspicion."""
        stage = self.reader.stage
        self.has_heard = True
        self._heard_at = time.time()
        if not is_backlog:
            self._suspect_at = None
        try:
            news = self.reader.feed(frame)
        except BuswayError as error:
            self.end(error)
            return
        if news is None:
            return
        if isinstance(news, Failed):
            self.has_terminal = True
            self.end(error_from(news.error))
            return
        self._frames.append(news)
        if isinstance(news, Finished):
            self.has_terminal = True
            self.disarm()
        elif self.reader.stage != stage:
            self._lost_at = None
            self._arm()
        self._wake()

    def suspect(self) -> None:
        """Frames may have been lost: expect the next one soon."""
        if not self.reader.is_closed:
            self._suspect_at = time.time()
            self._arm()

    def holder_left(self, holder: str) -> None:
        """A service is gone. If it was the holder, end the flight, after a moment for its last words.

        The holder is the router until decode holds the attempt (it deals with a lost prefill), then decode.
        """
        reader = self.reader
        if holder == (reader.decode_worker or reader.router) and not reader.is_closed:
            self._lost_at = time.time() + LOST_HOLDER_GRACE_S
            self._arm()

    def end(self, error: BuswayError) -> None:
        """End the flight with an error, to be raised once the frames before it have been taken."""
        self._error = self._error or error
        self.reader.is_closed = True
        self.disarm()
        self._wake()

    async def next_frames(self) -> list[Frame]:
        """Return the frames that arrived since the last call, at least one; raises what ended the flight."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        frames, self._frames = self._frames, []
        return frames

    def disarm(self) -> None:
        """Stop the timer; the flight is over or given up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _arm(self) -> None:
        self.disarm()
        ends = self._ends()
        if ends:
            delay_s = max(0.0, min(at for at, _ in ends) - time.time())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        # Within a stage the moments only move back with each frame: the timer fires early, looks, and is set again,
        # so that frames need not touch it.
        at, make_error = min(self._ends(), key=lambda end: end[0])
        if at <= time.time():
            self.end(make_error())
        else:
            self._arm()

    def _ends(self) -> list[_End]:
        ends: list[_End] = []
        due = next_due(self.request.deadlines, self.reader.stage, self._heard_at)
        if due is not None:
            ends.append((due.at, lambda: late(due)))
        if self._lost_at is not None:
            ends.append((self._lost_at, self._holder_lost))
        if self.reader.stage == "streaming":
            ends.append((self._heard_at + self._patience.silence_s, self._silent))
            if self._suspect_at is not None:
                ends.append((self._suspect_at + self._patience.suspect_silence_s, self._silent))
        elif self._suspect_at is not None:
            ends.append((self._suspect_at + self._patience.silence_s, self._silent))
        return ends

    def _silent(self) -> BuswayError:
        return self.reader.break_off(f"nothing heard for {time.time() - self._heard_at:.1f} s")

    def _holder_lost(self) -> BuswayError:
        holder = self.reader.decode_worker or self.reader.router
        return WorkerLostError(f"{holder} is gone, and with it the request", phase="stream")
