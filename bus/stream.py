"""What the owner of one attempt makes of the frames that reach it. Pure: frames in, news out; no clock, no I/O.

Router, prefill and decode all write to a stream, and NATS orders one publisher's messages only: lifecycle frames may
come late. Tokens come from one publisher, in order; what is missing is lost. h11's shape: feed it, use what it returns.
"""

from typing import NamedTuple

from bus.deadlines import Stage
from schemas.errors import StreamBrokenError
from schemas.frames import Accepted, Begun, Decoding, Failed, Finished, Frame, Prefilling, Tokens
from schemas.ids import AttemptId, WorkerId

_ORDER: tuple[Stage, ...] = ("sent", "accepted", "prefilling", "decoding", "streaming")


class Gap(NamedTuple):
    """Ids are missing: those from the reader's `next_seq` up to `seq`."""

    seq: int


class StreamReader:
    """One attempt's stream. `next_seq` is the number of ids delivered, the `num_resumed` given at the start included.

    `router`, `prefill_worker` and `decode_worker` are the holders heard of, also from frames too late to deliver.
    Frames beyond a gap are not taken: they come again with what is missing. After a terminal frame `is_closed`, and
    everything else is old news.
    """

    def __init__(self, attempt_id: AttemptId, *, num_resumed: int = 0) -> None:
        self.attempt_id = attempt_id
        self.next_seq = num_resumed
        self.stage: Stage = "sent"
        self.is_closed = False
        self.router: str | None = None
        self.prefill_worker: WorkerId | None = None
        self.decode_worker: WorkerId | None = None
        self.can_resume_exactly = False

    def feed(self, frame: Frame) -> Frame | Gap | None:
        """Return what of a frame is news to the owner: the frame, its new part, None (duplicate or late), or the Gap
        before it. Raises StreamBrokenError when it ends with fewer ids than were delivered.
        """
        match frame:
            case Tokens():
                return self._tokens(frame)
            case Finished():
                return self._finished(frame)
            case Failed():
                return self._failed(frame)
            case Begun():
                return None if self.is_closed else frame
            case _:
                return self._lifecycle(frame)

    def broken(self, reason: str) -> StreamBrokenError:
        """Return the error for a stream that can't go on."""
        return StreamBrokenError(f"stream broken after {self.next_seq} tokens: {reason}", phase="stream")

    def _lifecycle(self, frame: Accepted | Prefilling | Decoding) -> Frame | None:
        stage: Stage
        match frame:
            case Accepted():
                stage, self.router = "accepted", frame.router
            case Prefilling():
                stage, self.prefill_worker = "prefilling", frame.worker
            case Decoding():
                stage, self.decode_worker = "decoding", frame.worker
                self.can_resume_exactly = frame.can_resume_exactly
        return frame if self._advance(stage) else None

    def _advance(self, stage: Stage) -> bool:
        if self.is_closed or _ORDER.index(stage) <= _ORDER.index(self.stage):
            return False
        self.stage = stage
        return True

    def _tokens(self, frame: Tokens) -> Tokens | Gap | None:
        if self.is_closed:
            return None
        if frame.seq > self.next_seq:
            return Gap(frame.seq)
        num_old = self.next_seq - frame.seq
        if num_old >= len(frame.token_ids):
            return None
        self.stage = "streaming"
        self.next_seq = frame.seq + len(frame.token_ids)
        if num_old == 0:
            return frame
        logprobs = frame.logprobs[num_old:] if frame.logprobs is not None else None
        return Tokens(frame.attempt_id, frame.seq + num_old, frame.token_ids[num_old:], logprobs)

    def _finished(self, frame: Finished) -> Finished | Gap | None:
        if self.is_closed:
            return None
        if frame.seq > self.next_seq:
            return Gap(frame.seq)
        if frame.seq < self.next_seq:
            self.is_closed = True
            raise self.broken(f"it is said to have {frame.seq}")
        self.is_closed = True
        return frame

    def _failed(self, frame: Failed) -> Failed | None:
        # Whatever is missing before it, a failure is the news; its seq may be another holder's view.
        if self.is_closed:
            return None
        self.is_closed = True
        return frame
