"""The note a running stack leaves on its machine, so that `status`, `drain`, `chat` and `worker` find it.

$XDG_RUNTIME_DIR/busway/<pid>.json, else ~/.local/state/busway/<pid>.json; readable by its owner only, since the URLs
carry credentials. A note counts only while the very process that wrote it lives.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deploy.processes import is_same_process, start_time_of


class RuntimeNote(msgspec.Struct, frozen=True, kw_only=True):
    """A stack. `start_time` is in clock ticks since boot, `started_at` in Unix seconds. `nats_url` is the internal
    user's, `client_url` that of clients; `gateway_url` is "" until the gateway listens."""

    pid: int
    start_time: int
    started_at: float
    nats_url: str
    client_url: str
    namespace: str = "busway"
    gateway_url: str = ""
    model: str = ""


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Return where notes lie for this user; it may not exist yet."""
    if base := environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "busway"
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local" / "state")
    return Path(state) / "busway"


def new_note(*, nats_url: str, client_url: str, namespace: str, model: str) -> RuntimeNote:
    """Return a note for this process."""
    pid = os.getpid()
    return RuntimeNote(
        pid=pid,
        start_time=start_time_of(pid),
        started_at=time.time(),
        nats_url=nats_url,
        client_url=client_url,
        namespace=namespace,
        model=model,
    )


def write_note(folder: Path, note: RuntimeNote) -> Path:
    """Write the note in one step, replacing this process's earlier one; remove what dead stacks left."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    live_notes(folder)
    target = folder / f"{note.pid}.json"
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".note-")  # mkstemp makes it 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(note)))
    os.replace(temporary, target)
    return target


def remove_note(folder: Path) -> None:
    """Remove this process's note; idempotent."""
    (folder / f"{os.getpid()}.json").unlink(missing_ok=True)


def live_notes(folder: Path) -> list[RuntimeNote]:
    """Return the notes of live stacks, newest first, and remove those of dead ones."""
    live = []
    for path in folder.glob("*.json"):
        note = _read(path)
        if note is not None and is_same_process(note.pid, note.start_time):
            live.append(note)
        else:
            # Another process may be tidying too, or the folder may not be ours to write.
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(live, key=lambda note: note.started_at, reverse=True)


def newest_note(environ: Mapping[str, str]) -> RuntimeNote | None:
    """Return the note of the newest live stack of this user, if there is one."""
    notes = live_notes(runtime_dir(environ))
    return notes[0] if notes else None


def _read(path: Path) -> RuntimeNote | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RuntimeNote)
    except (OSError, msgspec.DecodeError):
        return None
