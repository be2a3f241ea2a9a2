"""Telling whoever started a service that it is ready: systemd's notify protocol, which the launcher speaks too.

A datagram of KEY=value lines on the socket that $NOTIFY_SOCKET names (sd_notify(3)). Under systemd use Type=notify.
"""

import os
import socket


def notify(*lines: str) -> None:
    """Send lines such as "READY=1" to the service manager; nothing happens when there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), address)


def parse(datagram: bytes) -> dict[str, str]:
    """Return the assignments of a datagram; lines without "=" are left out."""
    pairs = (line.partition("=") for line in datagram.decode(errors="replace").splitlines())
    return {key: value for key, mark, value in pairs if mark}
