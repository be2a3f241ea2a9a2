"""The launcher's end of the notify protocol: a datagram socket that its children write to."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.notify import parse

MAX_DATAGRAM_BYTES = 4096


@contextmanager
def ready_socket(path: Path, heard: Callable[[dict[str, str]], None]) -> Iterator[None]:
    """Call `heard` with every message that comes in on the socket at `path`, while the block runs."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.bind(str(path))
        loop.add_reader(sock, lambda: heard(parse(sock.recv(MAX_DATAGRAM_BYTES))))
        try:
            yield
        finally:
            loop.remove_reader(sock)
