"""Being seen by `nats micro`: the service protocol's PING, INFO and STATS, by nats-py's own implementation."""

from nats.aio.client import Client as NatsClient
from nats.micro import add_service


async def announce(client: NatsClient, service: str, version: str, metadata: dict[str, str]) -> None:
    """Answer $SRV requests as `busway-{service}` until the connection closes; `version` is semantic (1.2.3)."""
    await add_service(client, name=f"busway-{service}", version=version, metadata=metadata)
