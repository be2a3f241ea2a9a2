"""What a leg makes of an engine's output that it can't read: its own failure, and no other leg's."""

import logging

from schemas.errors import BuswayError, EngineError

_log = logging.getLogger(__name__)


def output_fault(engine: str, request_id: str, error: Exception) -> BuswayError:
    """Return what a request fails with whose output raised `error`. One that isn't ours is logged, with its place."""
    if isinstance(error, BuswayError):
        return error
    _log.error("an output of %s can't be read", request_id, exc_info=error)
    return EngineError(f"{engine}'s output can't be read: {type(error).__name__}: {error}")
