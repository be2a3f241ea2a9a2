"""Keeping start-up short: importing the bus without what a process won't use."""

import sys


def import_bus(nats_url: str) -> None:
    """Import the bus; without aiohttp, unless it is there already or the URL needs it.

    nats-py imports aiohttp for websocket URLs if it can, a third of a second of CPU in each process
    (nats/aio/transport.py@2.16.0). A None in sys.modules makes that import fail, as on a machine without aiohttp.
    """
    if "aiohttp" in sys.modules or nats_url.startswith(("ws:", "wss:")):
        import bus.connection

        return
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import bus.connection  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
