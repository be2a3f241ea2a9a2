"""The fleet as tables in a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from deploy.fleet import FleetStatus, ServiceRow, WorkerRow

COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "lost": "red"}


def print_fleet(fleet: FleetStatus) -> None:
    """Print workers, services and incompatible pairs to stdout."""
    console = Console()
    if not (fleet.workers or fleet.routers or fleet.gateways):
        console.print("The fleet is empty.")
        return
    console.print(_worker_table(fleet.workers))
    services = [("gateway", row) for row in fleet.gateways] + [("router", row) for row in fleet.routers]
    console.print(_service_table(services))
    for pair in fleet.incompatible:
        console.print(f"[yellow]never paired[/]: {pair.prefill} and {pair.decode} ({pair.model}): {pair.reason}")
    for reason in fleet.short_contexts:
        console.print(f"[yellow]short context[/]: {reason}")


def _worker_table(rows: Iterable[WorkerRow]) -> Table:
    table = Table("worker", "role", "model", "engine", "state", box=None, header_style="bold")
    for name in ("running", "waiting", "KV blocks"):
        table.add_column(name, justify="right")
    table.add_column("process")
    for row in rows:
        used = "-" if row.kv_blocks_used is None else str(row.kv_blocks_used)
        table.add_row(
            row.worker_id,
            row.role,
            row.model,
            row.engine,
            _state(row.state),
            "-" if row.running is None else str(row.running),
            "-" if row.waiting is None else str(row.waiting),
            f"{used}/{row.kv_blocks_total}",
            f"{row.host}:{row.pid}",
        )
    return table


def _service_table(rows: Iterable[tuple[str, ServiceRow]]) -> Table:
    table = Table("service", "id", "state", "process", "address", box=None, header_style="bold")
    for kind, row in rows:
        table.add_row(kind, row.id, _state(row.state), f"{row.host}:{row.pid}", row.url)
    return table


def _state(state: str) -> str:
    return f"[{COLOURS.get(state, 'white')}]{state}[/]"
