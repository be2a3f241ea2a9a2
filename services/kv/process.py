"""Which process is at the other end, and whether it is proven gone. Linux's /proc is the witness."""

import os
from functools import cache
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process for good: pids are reused, a pid with its start time isn't. `host_id` says where pids mean the same."""

    host_id: str
    pid: int
    start_ticks: int

    def is_gone(self) -> bool:
        """Return whether it is proven that this process has ended; False where it can't be known (another host)."""
        if self.host_id != host_id():
            return False
        stat = _stat(self.pid)
        return stat is None or stat[0] in "ZX" or stat[1] != self.start_ticks


@cache
def host_id() -> str:
    """Return what is equal for processes that can share memory: one kernel boot, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def this_process() -> Process:
    """Return the identity of the calling process."""
    stat = _stat(os.getpid())
    if stat is None:
        raise OSError("/proc/self/stat can't be read")
    return Process(host_id=host_id(), pid=os.getpid(), start_ticks=stat[1])


def _stat(pid: int) -> tuple[str, int] | None:
    """Return (state, start time) of a pid from /proc/pid/stat (proc(5): fields 3 and 22), None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
