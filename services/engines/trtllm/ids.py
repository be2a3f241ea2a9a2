"""Global ids of handoffs: 64 bits, as upstream's get_global_disagg_request_id lays them out [U]. Pure.

0 (1 bit) | milliseconds (39) | node (8) | process (6) | counter (10). Ids of 2^40 and above are global, those below
are an executor's own, so the two never collide. Upstream reads the monotonic clock, which starts again at each boot;
here it is Unix time, and the counter runs on into later milliseconds instead of wrapping within one.
"""

import hashlib

from schemas.ids import Epoch, WorkerId

TIME_BITS, NODE_BITS, PROCESS_BITS, COUNTER_BITS = 39, 8, 6, 10
MIN_GLOBAL_ID = 1 << 40


class DisaggIds:
    """Makes one worker's ids. Node and process are 14 bits of a hash of the worker's id and epoch."""

    def __init__(self, worker: WorkerId, epoch: Epoch) -> None:
        digest = hashlib.sha256(f"{worker}@{epoch}".encode()).digest()
        self._place = int.from_bytes(digest[:2], "big") >> 2
        self._last = 0

    def next(self, now_s: float) -> int:
        """Return an id that this worker has never made before; `now_s` is Unix time."""
        self._last = max(self._last + 1, int(now_s * 1000) << COUNTER_BITS)
        milliseconds, counter = self._last >> COUNTER_BITS, self._last % (1 << COUNTER_BITS)
        timestamp = milliseconds % (1 << TIME_BITS)
        made = (((timestamp << (NODE_BITS + PROCESS_BITS)) | self._place) << COUNTER_BITS) | counter
        return made if made >= MIN_GLOBAL_ID else made | MIN_GLOBAL_ID
