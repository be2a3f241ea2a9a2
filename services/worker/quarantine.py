"""When too much of the KV pool is set aside for transfers that nobody can prove ended (a peer that stopped, another
host's that was lost): the worker leaves and its supervisor starts it afresh, with a pool of its own again.
"""

import asyncio
import time
from collections.abc import Callable

from schemas.errors import EngineError
from services.engines.protocol import EngineLoad

MAX_SHARE = 0.1
PATIENCE_S = 10.0
LOOK_EVERY_S = 0.25


class QuarantineWatch:
    """Calls `on_lasting` once, when more than a tenth of the pool has been in quarantine for PATIENCE_S on end.

    Transfers that are merely slow to end settle within moments.
    """

    def __init__(self, load: Callable[[], EngineLoad], on_lasting: Callable[[EngineError], None]) -> None:
        self._load = load
        self._on_lasting = on_lasting
        self._since: float | None = None

    async def run(self) -> None:
        """Look until it is so."""
        while not self.is_lasting(time.monotonic()):  # noqa: ASYNC110 (a share has no event)
            await asyncio.sleep(LOOK_EVERY_S)
        load = self._load()
        share = f"{load.kv_blocks_quarantined} of {load.kv_blocks_total}"
        self._on_lasting(EngineError(f"{share} KV blocks wait for transfers whose end can't be known"))

    def is_lasting(self, now: float) -> bool:
        """Return whether the share has been too large for long enough; `now` is monotonic seconds."""
        load = self._load()
        if load.kv_blocks_quarantined <= MAX_SHARE * load.kv_blocks_total:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= PATIENCE_S
