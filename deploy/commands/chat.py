"""`busway chat`: one question to the running stack, the answer in the terminal as it comes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands import options
from deploy.commands.fleet import on_bus
from deploy.commands.options import running_stack, settle, shared

if TYPE_CHECKING:
    from bus.connection import Bus


def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str | None, typer.Option("--model", help="Served model; default: the gateway's first.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, max=2.0)] = None,
    url: Annotated[str | None, typer.Option("--url", help="The gateway; default: one of the fleet's.")] = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
) -> None:
    """Ask a question and stream the answer."""
    from deploy.chat_client import ChatRequest, first_model, stream_chat

    gateway = url or _find_gateway(nats_url, namespace, config)
    request = ChatRequest(
        url=gateway,
        model=model or first_model(gateway),
        question=question,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    for text in stream_chat(request):
        print(text, end="", flush=True)
    print()


def _find_gateway(nats_url: str | None, namespace: str | None, config: Path | None) -> str:
    """Return the URL of the running stack's gateway, or of a ready one in the named fleet's discovery."""
    nats = settle(config, shared(nats_url=nats_url, namespace=namespace), find_stack=False).settings.nats
    note = None if nats.url else running_stack()
    if note and note.gateway_url:
        return note.gateway_url

    async def ready_gateways(bus: "Bus") -> list[str]:
        from deploy.fleet import read_fleet

        return [row.url for row in (await read_fleet(bus)).gateways if row.state == "ready" and row.url]

    urls = on_bus(ready_gateways, nats_url, namespace, config)
    if not urls:
        from deploy.errors import CommandError

        raise CommandError("no ready gateway in this fleet; `busway status` shows what there is")
    return urls[0]
