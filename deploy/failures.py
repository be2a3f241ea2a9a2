"""From what ended a process to what it says and its exit code."""

import errno
import logging

from deploy.errors import CommandError, UsageError
from schemas.errors import BuswayError, RequestError

log = logging.getLogger(__name__)


def in_words(error: Exception, name: str) -> CommandError:
    """Return what ended a process as one line; what nobody foresaw is logged with its traceback."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    match error:
        case CommandError():
            return error
        case RequestError():  # a model or an engine argument that can't be used won't get better by a restart
            return UsageError(f"{name}: {error.message}")
        case BuswayError():
            return CommandError(f"{name}: {error.message}")
        case ModuleNotFoundError():  # an engine or a transfer that isn't installed: it says how to
            return UsageError(f"{name}: {error}")
        case OSError(errno=errno.EADDRINUSE):
            return UsageError(f"{name}: {error}")
        case OSError():
            return CommandError(f"{name}: {error}")
    log.critical("%s has failed", name, exc_info=error)
    return CommandError(f"{name} has failed: {type(error).__name__}: {error}")
