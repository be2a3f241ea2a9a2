"""The HTTP side of a reply: Server-Sent Events, one write per step; comments while nothing happens."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

from aiohttp import web

from schemas.errors import BuswayError
from services.gateway.exchange import Caller
from services.gateway.openai_errors import error_body, error_headers

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would gather the events
}
_JSON = "application/json"
_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED_NAMED = 16


class HttpReply:
    """One HTTP request's answer. `response` is what its handler returns; a stream has then already been written.

    Beside a label of the caller's own it is told the request's id, by which `busway trace` and `route-explain` find it.
    """

    def __init__(self, request: web.Request, caller: Caller) -> None:
        self.response: web.StreamResponse | None = None
        self.ignored_fields: tuple[str, ...] = ()
        self.is_stream = False
        self.last_write_at = monotonic()
        self._request = request
        self._caller = caller
        self._writing = asyncio.Lock()

    @property
    def has_begun(self) -> bool:
        """Whether stream headers are out, so that an error can no longer have a status."""
        return self.response is not None and not isinstance(self.response, web.Response)

    async def document(self, body: bytes) -> None:
        self.response = web.Response(body=body, content_type=_JSON, headers=self._headers())

    async def chunks(self, chunks: Sequence[bytes]) -> None:
        await self._write(_events(chunks))

    async def finish(self, chunks: Sequence[bytes]) -> None:
        await self._write(_events(chunks) + _DONE if chunks else _DONE, is_last=True)

    async def fail(self, error: BuswayError, asides: Mapping[str, object]) -> None:
        body = error_body(error, asides)
        if self.has_begun:
            # No [DONE] and no finish_reason: a client must not take this for an end.
            await self._write(b"event: error\ndata: %b\n\n" % body, is_last=True)
            return
        headers = self._headers() | error_headers(error)
        self.response = web.Response(status=error.http_status, body=body, content_type=_JSON, headers=headers)
        if self._request.content.exception() is not None:
            self.response.force_close()  # aiohttp drops the connection of a broken body: say so

    def abandon(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def keep_alive(self) -> None:
        """Send a comment, which opens the stream when nothing was sent yet; nothing while a write is under way."""
        if not self._writing.locked():
            await self._write(_COMMENT)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._writing:
            self.last_write_at = monotonic()
            if not isinstance(self.response, web.StreamResponse):
                self.response = web.StreamResponse(headers=_SSE_HEADERS | self._headers())
                await self.response.prepare(self._request)
            if is_last:
                await self.response.write_eof(data)
            else:
                await self.response.write(data)

    def _headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self._caller.label, "traceparent": self._caller.traceparent}
        if self._caller.label != self._caller.request_id:
            headers["X-Busway-Request-Id"] = self._caller.request_id
        named = [name for name in self.ignored_fields if _HEADER_SAFE.fullmatch(name)][:_MAX_IGNORED_NAMED]
        if named:
            headers["X-Busway-Ignored"] = ", ".join(named)
        return headers


class Pacemaker:
    """Keeps quiet streams alive: proxies cut a connection on which nothing happens. One task for all streams."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._replies: set[HttpReply] = set()

    @contextmanager
    def watching(self, reply: HttpReply) -> Iterator[None]:
        """Keep a reply alive for the length of the block, once it is known to be a stream."""
        self._replies.add(reply)
        try:
            yield
        finally:
            self._replies.discard(reply)

    async def run(self) -> None:
        """Comment on every stream that was silent for keepalive_s, until cancelled; 0 switches it off."""
        while self._keepalive_s > 0:
            await asyncio.sleep(self._keepalive_s / 4)
            quiet_since = monotonic() - self._keepalive_s
            for reply in [r for r in self._replies if r.is_stream and r.last_write_at <= quiet_since]:
                await self._comment(reply)

    async def _comment(self, reply: HttpReply) -> None:
        try:
            async with asyncio.timeout(self._keepalive_s / 4):
                await reply.keep_alive()
        except (ConnectionResetError, TimeoutError):
            self._replies.discard(reply)


def _events(chunks: Sequence[bytes]) -> bytes:
    return b"data: %b\n\n" % b"\n\ndata: ".join(chunks) if chunks else b""
