"""Explanations of routing, found among the live routers and printed."""

from rich.console import Console
from rich.table import Table

from bus.connection import Bus
from bus.discovery import watch
from schemas.errors import BuswayError
from schemas.explanation import Choice, ExplainRequest, Explanation, LocalPrefill, Refusal
from schemas.worker import ServiceRecord

ID_PREFIXES = ("chatcmpl-", "cmpl-")
"""What the gateway puts before a request's id in its answer."""


async def find_explanation(bus: Bus, id: str) -> Explanation | None:
    """Ask every router; return the answer of the one that knows the request. `id`: the answer's, or an attempt's."""
    for prefix in ID_PREFIXES:
        id = id.removeprefix(prefix)
    async with watch(bus) as fleet:
        records = [one for one in fleet.all_records.values() if isinstance(one, ServiceRecord)]
        for router in (one.id for one in records if one.service == "router"):
            subject = bus.subjects.router(router, "explain")
            try:
                explanation = await bus.ask(subject, ExplainRequest(id=id), Explanation)
            except BuswayError:
                continue  # it is gone or leaving: another may know
            if explanation.is_known:
                return explanation
    return None


def print_explanation(explanation: Explanation) -> None:
    """Print a request's choices, a table each, and why nobody took it where that is so."""
    console = Console()
    console.print(
        f"request {explanation.request_id}, attempt {explanation.attempt_id}: {explanation.num_prompt_tokens} prompt "
        f"tokens, routed by {explanation.router} (policy {explanation.policy})",
        highlight=False,
    )
    for choice in explanation.choices:
        console.print(_table(choice))
        if choice.local is not None:
            console.print(local_line(choice.local), highlight=False)
    if explanation.refusal is not None:
        console.print(refusal_line(explanation.refusal), highlight=False)


def local_line(local: LocalPrefill) -> str:
    """Return whether a prompt stayed on its decode worker, and why."""
    verdict = "stays on decode" if local.is_taken else "goes to prefill"
    if not local.worker:
        return f"{verdict}: {local.reason}"
    return (
        f"{verdict}: {local.reason} ({local.worker}: {local.uncached_tokens:,} of "
        f"{local.cached_tokens + local.uncached_tokens:,} tokens to compute; first token in {local.local_s * 1e3:,.1f} "
        f"ms there, in {local.remote_s * 1e3:,.1f} ms by prefill; {local.num_streams} streams there would lose "
        f"{local.streams_lose_s * 1e3:,.1f} ms)"
    )


def refusal_line(refusal: Refusal) -> str:
    """Return why nobody took a request."""
    return f"refused ({refusal.reason}): {refusal.message}; retry after {refusal.retry_after_s:.1f} s"


def _table(choice: Choice) -> Table:
    is_prefill = choice.leg == "prefill"
    title = f"{choice.leg}: {choice.worker} ({choice.why}; {choice.num_candidates} candidates)"
    table = Table(title=title, title_justify="left")
    names = ("cached", "to compute", "queued", "wait ms", "prefill ms", "TTFT ms") if is_prefill else ("held", "score")
    table.add_column("worker", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for bid in choice.bids:
        score = "full" if bid.score is None else f"{bid.score * 1e3:,.1f}" if is_prefill else f"{bid.score:,.0f}"
        cells = [f"{bid.cached_tokens:,}", f"{bid.uncached_tokens:,}", f"{bid.queued_tokens:,}"]
        cells += [f"{bid.pass_rest_s * 1e3:,.1f}", f"{bid.prefill_s * 1e3:,.1f}"]
        mark = "> " if bid.worker == choice.worker else "  "
        table.add_row(mark + bid.worker, *(cells if is_prefill else [f"{bid.held_tokens:,}"]), score)
    return table
