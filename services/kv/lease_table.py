"""The states of a lease on a handed-over prompt's blocks and what moves it between them: one table, and the diagram it
draws. Pure.
"""

from typing import Literal

LeaseState = Literal["unknown", "held", "confirmed", "expired", "revoked"]
"""`unknown`: not granted yet, or forgotten. `confirmed`: the bytes arrived while it was held; the KV may be used."""

LeaseTurn = Literal["grant", "renew", "confirm", "revoke", "expire"]
"""`revoke`: one side gave up. `expire`: prefill's clock says so."""

TABLE: dict[tuple[LeaseState, LeaseTurn], LeaseState] = {
    ("unknown", "grant"): "held",
    ("unknown", "revoke"): "revoked",
    ("held", "renew"): "held",
    ("held", "confirm"): "confirmed",
    ("held", "revoke"): "revoked",
    ("held", "expire"): "expired",
}
"""What isn't here changes nothing: each of the three ends is final, and an attempt is never granted a second lease."""


def render_diagram() -> str:
    """Return the table as a Mermaid state diagram, for ARCHITECTURE.md."""
    labels: dict[tuple[LeaseState, LeaseState], list[str]] = {}
    for (state, turn), after in TABLE.items():
        labels.setdefault((state, after), []).append(turn)
    lines = [f"    {one} --> {other}: {', '.join(turns)}" for (one, other), turns in labels.items()]
    ends = [f"    {state} --> [*]" for state in ("confirmed", "expired", "revoked")]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> unknown", *lines, *ends, "```"])
