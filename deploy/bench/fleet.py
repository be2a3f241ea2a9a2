"""Many workers, routers and gateways on this machine, live: is every request answered, spread, routed by prefix?

`python -m deploy.bench.fleet --prefill 25 --decode 25 --routers 2 --gateways 2`: 54 processes of about 70 MiB each.
"""

import asyncio
import time
from collections import Counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from deploy.bench.live_fleet import LiveFleet, live_fleet, names_of
from deploy.bench.shared_prefixes import Asked, Workload, mean_ttft_ms, play, reuse

ENGINE_ARGS = {"num_blocks": "2048", "prefill_ms_per_token": "0.05", "decode_ms_per_step": "2"}
IDLE_S = 2.0


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """`num_retries`: how often a request was told to come again, and did. `by_prefill` to `by_gateway`: requests each
    one had (routers and workers of those over the bus, gateways of those over HTTP). `num_kv_events`: changes of their
    caches that prefill workers told. `router_ms`: CPU of all routers a request, what they spend on an idle fleet
    (`idle_router_share` of a core) taken off."""

    num_asked: int
    num_retries: int
    errors: Counter[str]
    by_prefill: Counter[str]
    by_decode: Counter[str]
    by_router: Counter[str]
    by_gateway: Counter[str]
    reuse: float
    ttft_ms: float
    num_kv_events: int
    start_s: float
    router_ms: float
    idle_router_share: float
    rss_mib: dict[str, float]


async def measure(
    *, num_prefill: int, num_decode: int, num_routers: int, num_gateways: int, num_requests: int, rate: float
) -> FleetReport:
    """Start a fleet with policy kv, send it half of the requests over HTTP and half over the bus, and let it go."""
    names = names_of(g=num_gateways, r=num_routers, p=num_prefill, d=num_decode)
    began = time.monotonic()
    async with live_fleet(*names, policy="kv", engine_args=ENGINE_ARGS, timeout_s=300) as fleet:
        start_s = time.monotonic() - began
        idle_share = await _idle_share(fleet)
        work = Workload(num_prefixes=2 * num_prefill)
        before_s, began = fleet.cpu_s("r"), time.monotonic()
        asked = await _half_and_half(fleet, work, num_requests, rate)
        cpu_s = fleet.cpu_s("r") - before_s - idle_share * (time.monotonic() - began)
        loads = await fleet.loads("p")
        return FleetReport(
            num_asked=len(asked),
            num_retries=sum(one.num_retries for one in asked),
            errors=Counter(one.error for one in asked if one.error),
            by_prefill=Counter(one.prefill for one in asked if one.prefill),
            by_decode=Counter(one.decode for one in asked if one.decode),
            by_router=Counter(one.router for one in asked if one.router),
            by_gateway=Counter(one.gateway for one in asked if one.gateway),
            reuse=reuse(asked),
            ttft_ms=mean_ttft_ms(asked),
            num_kv_events=sum(load.last_kv_event for load in loads.values()),
            start_s=start_s,
            router_ms=cpu_s / len(asked) * 1e3,
            idle_router_share=idle_share,
            rss_mib={kind: fleet.rss_mib(kind) for kind in "grpd"},
        )


async def _idle_share(fleet: LiveFleet) -> float:
    before_s, began = fleet.cpu_s("r"), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (fleet.cpu_s("r") - before_s) / (time.monotonic() - began)


async def _half_and_half(fleet: LiveFleet, work: Workload, num_requests: int, rate: float) -> list[Asked]:
    middle = num_requests // 2
    async with asyncio.TaskGroup() as tasks:
        halves = [
            tasks.create_task(play(fleet, work, numbers=numbers, rate=rate / 2, over_http=over_http))
            for numbers, over_http in ((range(middle), True), (range(middle, num_requests), False))
        ]
    return [one for half in halves for one in half.result()]


def print_report(report: FleetReport) -> None:
    """Print a report as a table."""
    table = Table(title="fleet", title_justify="left", show_header=False)
    rows = {
        "answered": f"{report.num_asked - report.errors.total():,} of {report.num_asked:,} {dict(report.errors) or ''}",
        "asked again": f"{report.num_retries:,} times",
        "started in": f"{report.start_s:.1f} s",
        "prefix reuse": f"{report.reuse:.3f}",
        "mean TTFT": f"{report.ttft_ms:.1f} ms",
        "KV events told": f"{report.num_kv_events:,}",
        "router CPU a request": f"{report.router_ms:.2f} ms, and {report.idle_router_share:.3f} of a core when idle",
        "requests by router": _spread(report.by_router),
        "by gateway": _spread(report.by_gateway),
        "by prefill worker": _spread(report.by_prefill),
        "by decode worker": _spread(report.by_decode),
        "memory": ", ".join(f"{kind}* {mib:,.0f} MiB" for kind, mib in report.rss_mib.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _spread(counts: Counter[str]) -> str:
    return f"{len(counts)} of them, {min(counts.values())} to {max(counts.values())} each" if counts else "none"


def main(
    prefill: Annotated[int, typer.Option("--prefill", min=1)] = 25,
    decode: Annotated[int, typer.Option("--decode", min=1)] = 25,
    routers: Annotated[int, typer.Option("--routers", min=1)] = 2,
    gateways: Annotated[int, typer.Option("--gateways", min=1)] = 2,
    requests: Annotated[int, typer.Option("--requests", min=2)] = 400,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="Requests a second.")] = 20.0,
) -> None:
    """Run a fleet of sim workers on this machine, ask it, and print what was seen."""
    report = asyncio.run(
        measure(
            num_prefill=prefill,
            num_decode=decode,
            num_routers=routers,
            num_gateways=gateways,
            num_requests=requests,
            rate=rate,
        )
    )
    print_report(report)


if __name__ == "__main__":
    typer.run(main)
