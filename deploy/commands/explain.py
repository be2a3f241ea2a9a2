"""`busway route-explain`: why a request went where it went, from the router that chose."""

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands import options
from deploy.commands.fleet import on_bus

if TYPE_CHECKING:
    from bus.connection import Bus
    from schemas.explanation import Explanation


def route_explain(
    request: Annotated[str, typer.Argument(help="The answer's id (chatcmpl-…), or an attempt's.")],
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Show a recent request's candidates, prefix hits, estimates and choices (policy kv)."""

    async def read(bus: "Bus") -> "Explanation | None":
        from deploy.explaining import find_explanation

        return await find_explanation(bus, request)

    explanation = on_bus(read, nats_url, namespace, config)
    if explanation is None:
        from deploy.errors import CommandError

        raise CommandError(f"no router knows why {request!r} went anywhere: too long ago, or its policy isn't kv")
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(explanation)).decode())
    else:
        from deploy.explaining import print_explanation

        print_explanation(explanation)
