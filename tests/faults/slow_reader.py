"""An HTTP client that asks for a stream of fat events and leaves them in the sockets until it feels like reading."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

import orjson

RECEIVE_BUFFER_BYTES = 4096


class SlowReader:
    """Made by `asking`; closing its connection is leaving."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._got = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def asking(cls, url: str, max_tokens: int) -> AsyncIterator[Self]:
        """Ask for a chat with 20 logprobs a token: about 2 KB an event, megabytes in all."""
        parts = urlsplit(url)
        body = orjson.dumps(
            {
                "model": "sim",
                "messages": [{"role": "user", "content": "slowly"}],
                "max_tokens": max_tokens,
                "logprobs": True,
                "top_logprobs": 20,
                "stream": True,
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            await loop.sock_connect(sock, (parts.hostname, parts.port))
            await loop.sock_sendall(sock, head.encode() + body)
            yield cls(sock)

    async def begun(self) -> None:
        """Read as little as shows that the stream has begun."""
        async with asyncio.timeout(20.0):
            while b"data:" not in self._got:
                self._got += await asyncio.get_running_loop().sock_recv(self._sock, 512)

    async def read_all(self) -> tuple[int, str]:
        """Read to the end; return the number of tokens and the finish reason."""
        async with asyncio.timeout(60.0):
            while b"[DONE]" not in self._got[-100:]:
                got = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 16)
                assert got, self._got[-300:]
                self._got += got
        num_tokens, reason = 0, ""
        for event in _events(self._got):
            for choice in event["choices"]:
                num_tokens += len((choice.get("logprobs") or {}).get("content") or ())
                reason = choice.get("finish_reason") or reason
        return num_tokens, reason


def _events(raw: bytes) -> list[dict]:  # type: ignore[type-arg]
    """Return the events of a chunked response."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]
