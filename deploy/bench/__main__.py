"""The bench's own command: `python -m deploy.bench [SECTION …] [--quick] [--json FILE]`."""

import platform
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

SECTIONS = (
    "kv_transfer",
    "layer",
    "interference",
    "startup",
    "torch_engine",
    "engine_model",
    "prefix_index",
    "routing",
    "live_routing",
)
EXTERNAL_SECTIONS = ("vllm",)
"""These need an engine's own environment (deploy/engines/install.sh) and run only when named."""

console = Console()


def flat(prefix: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers in nested dicts with their paths; lists (single turns) are left to the JSON file."""
    if isinstance(value, dict):
        return [row for key, child in value.items() for row in flat(f"{prefix}.{key}" if prefix else key, child)]
    return [(prefix, float(value))] if isinstance(value, int | float) else []


def show(name: str, result: dict[str, Any]) -> None:
    table = Table(title=name, title_justify="left", show_header=False)
    for path, number in flat("", {key: value for key, value in result.items() if key != "turns"}):
        table.add_row(path, f"{number:,.4g}")
    console.print(table)


def main(
    sections: Annotated[
        list[str] | None,
        typer.Argument(help=f"any of {', '.join(SECTIONS)} (all of these by default), {', '.join(EXTERNAL_SECTIONS)}"),
    ] = None,
    quick: Annotated[bool, typer.Option(help="one short turn each: shows that it runs, not how fast")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures there")] = None,
) -> None:
    """Measure in turns and print ratios; see each section's module for what is compared."""
    known = (*SECTIONS, *EXTERNAL_SECTIONS)
    unknown = set(sections or ()) - set(known)
    if unknown:
        raise typer.BadParameter(f"unknown section {sorted(unknown)[0]!r}; known: {', '.join(known)}")
    results: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {platform.platform()}"}
    for name in sections or SECTIONS:
        run: Callable[..., dict[str, Any]] = import_module(f"deploy.bench.{name}").run
        results[name] = run(quick=quick)
        show(name, results[name])
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    typer.run(main)
