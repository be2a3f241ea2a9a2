"""What this worker has sent of each attempt, for owners and routers who missed some of it. Pure: `now` is monotonic
seconds."""

from collections import OrderedDict, deque

import msgspec

from schemas.frames import Failed, Finished, Tokens
from schemas.hop import PrefillResult
from schemas.ids import AttemptId

MAX_FRAMES = 4096
MAX_ENDED = 1024
KEEP_S = 30.0

StreamFrame = Tokens | Finished | Failed


class _Sent(msgspec.Struct):
    """`from_seq` is where the frames still kept begin."""

    subject: str
    from_seq: int
    frames: deque[StreamFrame]


class SentFrames:
    """The newest `max_frames` frames of each attempt, until it is forgotten or KEEP_S after its end."""

    def __init__(self, max_frames: int = MAX_FRAMES) -> None:
        self._max_frames = max_frames
        self._sent: dict[AttemptId, _Sent] = {}
        self._ended: OrderedDict[AttemptId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def begin(self, attempt_id: AttemptId, subject: str, from_seq: int) -> None:
        """An attempt will be streamed to a subject, from a token on."""
        self._sent[attempt_id] = _Sent(subject, from_seq, deque())

    def note(self, attempt_id: AttemptId, frame: StreamFrame) -> None:
        """A frame of a begun attempt is sent."""
        sent = self._sent.get(attempt_id)
        if sent is None:
            return
        sent.frames.append(frame)
        if len(sent.frames) > self._max_frames:
            sent.frames.popleft()
            sent.from_seq = sent.frames[0].seq

    def end(self, attempt_id: AttemptId, now: float) -> None:
        """The terminal frame is sent; it may be asked for again for a while."""
        if attempt_id in self._sent:
            self._ended[attempt_id] = now
        while self._ended:
            oldest, at = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and now - at <= KEEP_S:
                return
            self.forget(oldest)

    def forget(self, attempt_id: AttemptId) -> None:
        """Nobody will ask for it."""
        self._sent.pop(attempt_id, None)
        self._ended.pop(attempt_id, None)

    def since(self, attempt_id: AttemptId, from_seq: int) -> tuple[str, list[StreamFrame]] | None:
        """Return the stream subject and the frames from a token on; None when the attempt or that token isn't kept."""
        sent = self._sent.get(attempt_id)
        if sent is None or from_seq < sent.from_seq:
            return None
        return sent.subject, [frame for frame in sent.frames if _reaches(frame, from_seq)]


def _reaches(frame: StreamFrame, from_seq: int) -> bool:
    return not isinstance(frame, Tokens) or frame.seq + len(frame.token_ids) > from_seq


class SentResults:
    """The newest outcomes of prefill legs: where each was sent, and what."""

    def __init__(self, max_results: int = MAX_ENDED) -> None:
        self._max_results = max_results
        self._results: OrderedDict[AttemptId, tuple[str, PrefillResult]] = OrderedDict()

    def note(self, subject: str, result: PrefillResult) -> None:
        """An outcome is sent."""
        self._results[result.attempt_id] = (subject, result)
        if len(self._results) > self._max_results:
            self._results.popitem(last=False)

    def forget(self, attempt_id: AttemptId) -> None:
        """The leg was aborted: what it came to is void."""
        self._results.pop(attempt_id, None)

    def get(self, attempt_id: AttemptId) -> tuple[str, PrefillResult] | None:
        """Return the subject and the outcome, if it is kept."""
        return self._results.get(attempt_id)
