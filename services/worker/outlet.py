"""From engine events to messages: one a stream subject and engine step, published in order by one task.

Publishing back to back costs a sixth of publishing with a pause between (facts/nats.md), so nothing here makes a task
or yields per token.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence

from bus.connection import Bus
from schemas.errors import BusUnavailableError, BuswayError, PayloadTooLargeError
from schemas.frames import Failed, Frame, Tokens, encode_frames
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.message import encode

logger = logging.getLogger(__name__)

Result = PrefillDone | PrefillEnded | PrefillFailed


class Outlet:
    """What this worker has to say, until it is said. `say` and `tell` return at once; `run` publishes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._frames: dict[str, list[Frame]] = {}
        self._results: list[tuple[str, Result]] = []
        self._has_news = asyncio.Event()

    def say(self, stream_subject: str, frame: Frame) -> None:
        """Send a frame with this step's others of the same subject."""
        self._frames.setdefault(stream_subject, []).append(frame)
        self._has_news.set()

    def tell(self, result_subject: str, result: Result) -> None:
        """Send a prefill leg's outcome to its router."""
        self._results.append((result_subject, result))
        self._has_news.set()

    def discard(self) -> None:
        """Forget what hasn't been said yet."""
        self._frames.clear()
        self._results.clear()

    async def run(self) -> None:
        """Publish what comes, until cancelled."""
        while True:
            await self._has_news.wait()
            await self.flush()

    async def flush(self) -> None:
        """Publish all there is. What the bus won't take is lost, and logged: streams show the gap to their owners."""
        self._has_news.clear()
        frames, self._frames = self._frames, {}
        results, self._results = self._results, []
        for subject, result in results:
            await self._publish(subject, self._encoded(result))
        for subject, said in frames.items():
            for payload in split(said, self._bus.max_payload_bytes):
                await self._publish(subject, payload)

    def _encoded(self, result: Result) -> bytes:
        payload = encode(result)
        limit = self._bus.max_payload_bytes
        if len(payload) <= limit:
            return payload
        error = PayloadTooLargeError(f"prefill result of {len(payload)} bytes exceeds NATS's limit of {limit} bytes")
        return encode(PrefillFailed(attempt_id=result.attempt_id, error=error.record()))

    async def _publish(self, subject: str, payload: bytes) -> None:
        try:
            await self._bus.publish(subject, payload)
        except BusUnavailableError as error:
            logger.error("frames lost: %s", error.message)
        except BuswayError as error:
            logger.error("frames to %s refused: %s", subject, error.message)


def split(frames: Sequence[Frame], max_payload_bytes: int) -> Iterator[bytes]:
    """Yield the frames as messages of at most `max_payload_bytes`, in order; usually one.

    A Tokens frame that is too large alone is cut into smaller ones; anything else that is becomes a Failed.
    """
    payload = encode_frames(list(frames))
    if len(payload) <= max_payload_bytes:
        yield payload
        return
    if len(frames) > 1:
        middle = len(frames) // 2
        halves: tuple[Sequence[Frame], ...] = (frames[:middle], frames[middle:])
    else:
        halves = _cut(frames[0], len(payload), max_payload_bytes)
    for half in halves:
        yield from split(half, max_payload_bytes)


def _cut(frame: Frame, num_bytes: int, max_payload_bytes: int) -> tuple[Sequence[Frame], ...]:
    if isinstance(frame, Tokens) and len(frame.token_ids) > 1:
        middle = len(frame.token_ids) // 2
        return tuple([_part(frame, start, stop)] for start, stop in ((0, middle), (middle, len(frame.token_ids))))
    error = PayloadTooLargeError(f"frame of {num_bytes} bytes exceeds NATS's limit of {max_payload_bytes} bytes")
    seq = frame.seq if isinstance(frame, Tokens | Failed) else 0
    return ([Failed(attempt_id=frame.attempt_id, seq=seq, error=error.record())],)


def _part(frame: Tokens, start: int, stop: int) -> Tokens:
    logprobs = None if frame.logprobs is None else frame.logprobs[start:stop]
    return Tokens(frame.attempt_id, frame.seq + start, frame.token_ids[start:stop], logprobs)
