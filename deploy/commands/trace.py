"""`busway trace`: where a request's time went, from the gateway that answered it."""

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands import options
from deploy.commands.fleet import on_bus

if TYPE_CHECKING:
    from bus.connection import Bus
    from schemas.trace import Trace


def trace(
    request: Annotated[
        str, typer.Argument(help="The answer's id (chatcmpl-…), its X-Request-Id, a trace's or an attempt's id.")
    ],
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Show a recent request's phases, which add up to its time to first token and its total, and every attempt."""

    async def read(bus: "Bus") -> "tuple[Trace | None, int]":
        from deploy.tracing import find_trace

        return await find_trace(bus, request)

    found, num_gateways = on_bus(read, nats_url, namespace, config)
    if found is None:
        from deploy.errors import CommandError

        raise CommandError(f"none of {num_gateways} gateways knows {request!r}: too long ago, or not asked through one")
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        from deploy.tracing import print_trace

        print_trace(found)
