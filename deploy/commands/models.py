"""`busway models`: models in the cache."""

from typing import Annotated

import typer

app = typer.Typer(help="Models in the cache.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Models in the cache."""


@app.command()
def fetch(name: Annotated[str | None, typer.Argument(help="Name; the default model without it.")] = None) -> None:
    """Fetch a model and convert it, once; prints its folder."""
    from deploy.errors import CommandError
    from deploy.models import DEFAULT_MODEL, ModelError, fetch_model

    try:
        print(fetch_model(name or DEFAULT_MODEL))
    except ModelError as error:
        raise CommandError(str(error)) from error
