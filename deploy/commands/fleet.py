"""`busway status`, `busway drain` and `busway role`: looking at the fleet, sending a worker home or to other work."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deploy.commands import options
from deploy.commands.options import settle, shared

if TYPE_CHECKING:
    from bus.connection import Bus
    from deploy.fleet import FleetStatus

T = TypeVar("T")


def status(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Show the fleet: workers with their load, routers, gateways, and pairs that can't work together."""

    async def read(bus: "Bus") -> "FleetStatus":
        from deploy.fleet import read_fleet

        return await read_fleet(bus)

    fleet = on_bus(read, nats_url, namespace, config)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(fleet)).decode())
    else:
        from deploy.fleet_table import print_fleet

        print_fleet(fleet)


def drain(
    worker: Annotated[str, typer.Argument(help="The worker's id, as `busway status` shows it.")],
    grace: Annotated[float | None, typer.Option("--grace", min=0.0, help="Seconds; default: the worker's own.")] = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Let a worker finish what it has, take nothing new and leave; returns when it is safe to stop it."""

    async def send(bus: "Bus") -> None:
        from deploy.draining import drain_worker
        from schemas.ids import WorkerId

        await drain_worker(bus, WorkerId(worker), grace_s=grace)

    on_bus(send, nats_url, namespace, config)
    print(f"{worker} is drained")


def role(
    worker: Annotated[str, typer.Argument(help="The worker's id, as `busway status` shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    grace: Annotated[
        float | None, typer.Option("--grace", min=0.0, help="Seconds until what it still holds goes on elsewhere.")
    ] = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Let a worker finish what it has and serve in another role, without loading its model again."""

    async def send(bus: "Bus") -> None:
        from deploy.draining import change_role
        from schemas.ids import WorkerId

        await change_role(bus, WorkerId(worker), role, grace_s=grace)

    on_bus(send, nats_url, namespace, config)
    print(f"{worker} serves as {role}")


def on_bus(
    action: "Callable[[Bus], Awaitable[T]]", nats_url: str | None, namespace: str | None, config: Path | None
) -> T:
    """Return what `action` makes of a connection to the fleet's NATS; its errors become the command's."""
    resolved = settle(config, shared(nats_url=nats_url, namespace=namespace))
    nats = resolved.settings.nats
    from deploy.errors import UsageError

    if not nats.url:
        raise UsageError("no running stack found here: give --nats-url or BUSWAY_NATS_URL, or run `busway serve`")
    import secrets

    import uvloop

    from deploy.failures import in_words
    from deploy.imports import import_bus

    import_bus(nats.url)
    from bus.connection import Bus

    async def connected() -> T:
        me = f"cli-{secrets.token_hex(4)}"
        async with Bus.connect(
            nats.url, name=me, client_id=me, namespace=nats.namespace, replicas=nats.replicas
        ) as bus:
            return await action(bus)

    try:
        result: T = uvloop.run(connected())
        return result
    except Exception as error:
        raise in_words(error, "busway") from error
