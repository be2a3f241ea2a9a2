"""The states of a request at its owner and what moves it between them: one table, and the diagram it draws. Pure."""

from typing import Literal

State = Literal["new", "sent", "held", "streaming", "mending", "waiting", "over"]
"""`sent`: an attempt is on the bus, nobody has answered. `held`: someone has it, no token yet. `mending`: the holder is
asked for what may be missing. `waiting`: between two attempts."""

Turn = Literal[
    "send",
    "not taken",
    "accepted",
    "token",
    "gap",
    "silence",
    "mended",
    "nothing missing",
    "lost",
    "finished",
    "failed",
    "closed",
]
"""`lost`: holder gone, ignorant or failed in a way that another may not. `failed`: an error that no other attempt can
cure, a deadline, or the last of the attempts. `closed`: the caller has lost interest."""

TABLE: dict[tuple[State, Turn], State] = {
    ("new", "send"): "sent",
    ("new", "failed"): "over",
    ("new", "closed"): "over",
    ("sent", "accepted"): "held",
    ("sent", "token"): "streaming",
    ("sent", "gap"): "mending",
    ("sent", "not taken"): "waiting",
    ("sent", "lost"): "waiting",
    ("sent", "finished"): "over",
    ("sent", "failed"): "over",
    ("sent", "closed"): "over",
    ("held", "token"): "streaming",
    ("held", "gap"): "mending",
    ("held", "silence"): "mending",
    ("held", "lost"): "waiting",
    ("held", "finished"): "over",
    ("held", "failed"): "over",
    ("held", "closed"): "over",
    ("streaming", "gap"): "mending",
    ("streaming", "silence"): "mending",
    ("streaming", "lost"): "waiting",
    ("streaming", "finished"): "over",
    ("streaming", "failed"): "over",
    ("streaming", "closed"): "over",
    ("mending", "mended"): "streaming",
    ("mending", "nothing missing"): "held",
    ("mending", "lost"): "waiting",
    ("mending", "finished"): "over",
    ("mending", "failed"): "over",
    ("mending", "closed"): "over",
    ("waiting", "send"): "sent",
    ("waiting", "failed"): "over",
    ("waiting", "closed"): "over",
}
"""What isn't here can't happen. An attempt that has no token yet is `held` again when nothing was missing."""


def render_diagram() -> str:
    """Return the table as a Mermaid state diagram, for ARCHITECTURE.md."""
    labels: dict[tuple[State, State], list[str]] = {}
    for (state, turn), after in TABLE.items():
        labels.setdefault((state, after), []).append(turn)
    lines = [f"    {one} --> {other}: {', '.join(turns)}" for (one, other), turns in labels.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> new", *lines, "    over --> [*]", "```"])
