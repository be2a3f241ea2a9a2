"""One attempt of a request as its owner sees it: its stream, who holds it, and what is being mended. Pure."""

from bus.life_events import Holder
from bus.stream import StreamReader
from schemas.request import GenerateRequest


class Attempt:
    """`gap`: up to which id something is known to be missing. `mend_at`: when the answer to a question should have
    brought it; `lost_at`: when a holder that has left has had its last word."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.id = request.attempt_id
        self.reader = StreamReader(request.attempt_id, num_resumed=len(request.resume))
        self.gap: int | None = None
        self.num_asks = 0
        self.mend_at: float | None = None
        self.lost_at: float | None = None

    @property
    def holder(self) -> Holder | None:
        """Who answers for it: the router until decode holds it (it deals with a lost prefill), then decode."""
        reader = self.reader
        if reader.decode_worker is not None:
            return Holder("worker", reader.decode_worker)
        return None if reader.router is None else Holder("router", reader.router)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Everyone who has said that he holds it."""
        reader = self.reader
        workers = dict.fromkeys(worker for worker in (reader.prefill_worker, reader.decode_worker) if worker)
        routers = () if reader.router is None else (Holder("router", reader.router),)
        return (*routers, *(Holder("worker", worker) for worker in workers))

    @property
    def has_tokens(self) -> bool:
        return self.reader.stage == "streaming"

    @property
    def is_whole(self) -> bool:
        """Whether all that is known to exist has come."""
        return self.gap is None or self.reader.next_seq >= self.gap

    def mended(self) -> None:
        """Nothing is missing any more."""
        self.gap = self.mend_at = None
        self.num_asks = 0
