"""How a process logs: one line a record to stderr, as text or JSON, and no floods. A line that is about a request
(services.log_context) names it.

The one INFO line a request writes at its end is written by who supervises the request; metrics live with the gateway.
"""

import logging
import sys
import time
from collections import deque
from typing import Literal

import msgspec

from services import log_context

Level = Literal["debug", "info", "warning", "error"]


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_repeats_per_minute` caps the lines that one warning or error statement may write (0: no cap)."""

    level: Level = "info"
    format: Literal["text", "json"] = "text"
    max_repeats_per_minute: int = 20


class RepeatLimit:
    """Says whether a key may speak again: at most `max_per_minute` times in any 60 s. Pure; `now` is in seconds."""

    def __init__(self, max_per_minute: int) -> None:
        self._max = max_per_minute
        self._said: dict[object, deque[float]] = {}
        self._unsaid: dict[object, int] = {}

    def admit(self, key: object, now: float) -> int | None:
        """Return how many times the key was refused since it last spoke, or None when it is refused now."""
        said = self._said.setdefault(key, deque())
        while said and said[0] <= now - 60.0:
            said.popleft()
        if len(said) >= self._max:
            self._unsaid[key] = self._unsaid.get(key, 0) + 1
            return None
        said.append(now)
        return self._unsaid.pop(key, 0)


class FloodFilter(logging.Filter):
    """Caps repeated warnings and errors of one statement (logger and template): a dead peer isn't a million lines."""

    def __init__(self, max_per_minute: int) -> None:
        super().__init__()
        self._limit = RepeatLimit(max_per_minute)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        unsaid = self._limit.admit((record.name, record.levelno, str(record.msg)), time.monotonic())
        if unsaid is None:
            return False
        if unsaid:
            record.msg = f"{record.getMessage()} [{unsaid} more like this were not shown]"
            record.args = None
        return True


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO  services.router.service: text [request_id=… trace_id=… attempt_id=…]`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = log_context.names()
        line = super().formatMessage(record)
        if about is None:
            return line
        # A bus client chooses its request id: it must not be able to begin a line of its own.
        return f"{line} [{' '.join(f'{name}={_in_one_line(value)}' for name, value in about.fields().items())}]"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, service, logger, message; request_id, trace_id and attempt_id
    of the request it is about; error when there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (about := log_context.names()) is not None:
            line |= about.fields()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def setup_logging(config: LogConfig, *, service: str) -> None:
    """Send this process's log records to stderr; replaces whatever was set before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if config.format == "json" else TextFormatter())
    if config.max_repeats_per_minute:
        handler.addFilter(FloodFilter(config.max_repeats_per_minute))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for chatty in ("aiohttp.access", "asyncio", "nats"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(config.level.upper())))


def _in_one_line(text: str) -> str:
    return text if text.isprintable() and " " not in text else ascii(text)
