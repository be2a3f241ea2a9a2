"""The `busway` program. Every command imports what it needs when it runs, so that the quick ones are quick."""

import sys

import typer

from deploy.commands import chat, explain, fleet, models, replay, serve, services, trace
from deploy.errors import CommandError

app = typer.Typer(
    name="busway",
    help="Disaggregated LLM serving: requests are NATS messages, the KV cache moves by NIXL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(serve.demo)
app.command()(services.gateway)
app.command()(services.router)
app.command()(services.worker)
app.command()(fleet.status)
app.command()(fleet.drain)
app.command()(fleet.role)
app.command()(chat.chat)
app.command()(replay.replay)
app.command()(explain.route_explain)
app.command()(trace.trace)
app.add_typer(models.app, name="models")


@app.command()
def version() -> None:
    """Print busway's version."""
    from importlib.metadata import version

    print(version("busway"))


def main() -> None:
    """Run the command line; exits with 0, 1 (it failed) or 2 (it was called or configured wrongly)."""
    try:
        app()
    except CommandError as error:
        print(f"busway: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
