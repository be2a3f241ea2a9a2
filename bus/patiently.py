"""Orders to JetStream by a process that starts: a cluster that has lost a node elects for seconds, and takes none."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

START_PATIENCE_S = 20.0
PAUSE_S = (0.2, 0.6)


async def patiently(order: Callable[[], Awaitable[None]], *, for_s: float = START_PATIENCE_S) -> None:
    """Give an order until it is taken; raises the last BusUnavailableError after `for_s`."""
    give_up_at = asyncio.get_running_loop().time() + for_s
    while True:
        try:
            return await order()
        except BusUnavailableError as error:
            if asyncio.get_running_loop().time() > give_up_at:
                raise
            logger.warning("trying again: %s", error.message)
        await asyncio.sleep(random.uniform(*PAUSE_S))
