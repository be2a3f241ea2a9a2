"""The way back to a caller, whatever carried the request here: HTTP and NATS implement it, the answering uses it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from schemas.errors import BuswayError


class Reply(Protocol):
    """One request's answer: either one document, or chunks and then `finish`, or at any point `fail`.

    `is_stream`: chunks will come. `ignored_fields` are told to the caller where the transport has room for it.
    Methods raise ConnectionResetError when the caller is known to be gone.
    """

    ignored_fields: tuple[str, ...]
    is_stream: bool

    async def document(self, body: bytes) -> None:
        """Answer with one JSON document."""
        ...

    async def chunks(self, chunks: Sequence[bytes]) -> None:
        """Send one step's chunks, in one write; the first call opens the stream."""
        ...

    async def finish(self, chunks: Sequence[bytes]) -> None:
        """Send the last chunks, if any, and end the stream as complete."""
        ...

    async def fail(self, error: BuswayError, asides: Mapping[str, object]) -> None:
        """Answer with an error: with its status while nothing was sent, else as the stream's last word. `asides` is
        what the caller asked to be told beside it."""
        ...

    def abandon(self) -> None:
        """Cut the caller off: it takes no more bytes, and not even the last word went through."""
        ...
