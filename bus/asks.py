"""Requests that wait for an answer: one subscription, one future each."""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any, Union

from nats.aio.msg import Msg

from schemas.errors import BusError, ErrorRecord, NoRespondersError, RequestError, error_from
from schemas.message import decode

_NO_RESPONDERS = "503"


class Asks:
    """The waiting requests of one connection. `stem` is unguessable: nobody else can forge an answer."""

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """Yield a fresh reply subject and the future of the message that comes to it."""
        reply = f"{self._stem}{next(self._numbers)}"
        future = self._waiting[reply] = asyncio.get_running_loop().create_future()
        try:
            yield reply, future
        finally:
            del self._waiting[reply]

    async def on_message(self, msg: Msg) -> None:
        """Hand an answer to whoever waits; called by nats-py."""
        future = self._waiting.get(msg.subject)
        if future is not None and not future.done():
            future.set_result(msg)

    @staticmethod
    def read(subject: str, msg: Msg, answer: Any) -> Any:
        """Return the answer in a message; raises the error it carries."""
        if not msg.data and msg.headers and msg.headers.get("Status") == _NO_RESPONDERS:
            raise NoRespondersError(f"nobody listens on {subject}")
        if answer is bytes:
            return msg.data
        try:
            result = decode(msg.data, _or_error(answer))
        except RequestError as error:
            # The request was well-formed: the answer is at fault.
            raise BusError(f"answer from {subject}: {error.message}") from error
        if isinstance(result, ErrorRecord):
            raise error_from(result)
        return result


@lru_cache(maxsize=256)
def _or_error(answer: Any) -> Any:
    return Union[answer, ErrorRecord]  # noqa: UP007 (answer is a value, and may be a union already)
