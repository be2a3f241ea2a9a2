"""How engines run a task that is one handoff's."""

import logging
from collections.abc import Coroutine

_log = logging.getLogger(__name__)


async def logged(coroutine: Coroutine[object, object, None], name: str) -> None:
    """Run a task of one handoff: a fault of ours in it costs that handoff, not the engine."""
    try:
        await coroutine
    except Exception:
        _log.exception("the task %s failed", name)
