"""A request's trace, found among the live gateways and printed."""

from datetime import UTC, datetime

from msgspec import structs
from rich.console import Console
from rich.table import Table

from bus.connection import Bus
from bus.discovery import watch
from schemas.errors import BuswayError
from schemas.trace import AttemptTrace, CompletionTrace, Trace, TraceRequest

BAR_CHARS = 24
NOTES = {
    "gateway": "read, tokenize, plan",
    "retry": "attempts that brought no token",
    "queue": "on the bus, to a router",
    "route": "router, and messages to and from prefill",
    "prefill queue": "in the prefill worker",
    "prefill": "the prompt",
    "decode queue": "for decode's blocks",
    "transfer": "of KV",
    "first token": "decode's step, and messages here",
    "unreported": "its holders have not told",
    "decode": "from the first token on",
}


async def find_trace(bus: Bus, id: str) -> tuple[Trace | None, int]:
    """Ask every live gateway; return the answer of the one that knows the request, and how many were asked."""
    async with watch(bus) as fleet:
        await fleet.first_beats()
        gateways = sorted(fleet.gateways)
        for gateway in gateways:
            try:
                trace = await bus.ask(bus.subjects.gateway(gateway, "trace"), TraceRequest(id=id), Trace)
            except BuswayError:
                continue  # it is gone or leaving: another may know
            if trace.request_id:
                return trace, len(gateways)
    return None, len(gateways)


def print_trace(trace: Trace) -> None:
    """Print a request: what it was, and for each completion its phases and attempts."""
    console = Console()
    arrived = datetime.fromtimestamp(trace.arrived_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    label = f" (X-Request-Id {trace.label})" if trace.label else ""
    lines = [
        f"request {trace.request_id}{label}, trace {trace.trace_id}",
        f"{trace.endpoint} of {trace.model or 'no known model'} at {arrived} UTC by {trace.gateway}: {trace.outcome}"
        f" after {_ms(trace.total_s)} ms, {trace.num_prompt_tokens} prompt tokens",
        *([trace.error] if trace.error else []),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for completion in trace.completions:
        if len(trace.completions) > 1:
            console.print(f"choice {completion.index}", highlight=False)
        console.print(phase_table(completion))
        for number, attempt in enumerate(completion.attempts, start=1):
            console.print(attempt_line(number, attempt), highlight=False, markup=False, soft_wrap=True)


def phase_table(completion: CompletionTrace) -> Table:
    """Return the phases in the order of time, with the sums that they add up to."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, seconds in structs.asdict(completion.phases).items():
        phase = name.removesuffix("_s").replace("_", " ")
        if phase == "decode" and completion.ttft_s is not None:
            table.add_row("TTFT", f"{_ms(completion.ttft_s)} ms", "", "", style="bold")
        if seconds or phase not in ("retry", "unreported"):
            bar = "█" * round(BAR_CHARS * seconds / completion.total_s) if completion.total_s else ""
            table.add_row(f"  {phase}", f"{_ms(seconds)} ms", bar, _note(phase, completion))
    table.add_row("total", f"{_ms(completion.total_s)} ms", "", "", style="bold")
    return table


def attempt_line(number: int, attempt: AttemptTrace) -> str:
    """Return what became of an attempt."""
    way = " -> ".join(one for one in (attempt.router, attempt.prefill_worker, attempt.decode_worker) if one)
    end = f"lost to {attempt.ended_by}" if attempt.ended_by else "the last one"
    return (
        f"attempt {number} {attempt.attempt_id}: sent at {_ms(attempt.sent_s)} ms, {way or 'taken by nobody'}, "
        f"got as far as {attempt.reached}, {_ms(attempt.total_s)} ms, {end}"
    )


def _note(phase: str, completion: CompletionTrace) -> str:
    if phase == "transfer" and completion.kv_bytes:
        meanwhile = f", {_ms(completion.overlap_s)} ms more during prefill" if completion.overlap_s else ""
        return f"{completion.kv_bytes:,} bytes of KV{meanwhile}"
    if phase == "decode":
        return f"{completion.num_tokens} tokens in all"
    return NOTES[phase]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
