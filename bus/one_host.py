"""Embedded servers are named after their machine, so that whoever is connected to one knows that all others are here.

A URL doesn't tell: 127.0.0.1 may be a server that listens on all devices, or a tunnel to another host.
"""

import secrets
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def _prefix() -> str:
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"unknown-{secrets.token_hex(8)}"
    return f"busway-embedded-{machine}-"


def new_server_name() -> str:
    """Return a name for a server that listens on this machine's loopback device only."""
    return f"{_prefix()}{secrets.token_hex(4)}"


def is_one_host(server_name: str) -> bool:
    """Return whether a server of this name can be reached by processes of this machine only."""
    return server_name.startswith(_prefix())
