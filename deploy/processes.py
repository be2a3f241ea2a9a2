"""What the operating system knows of a process: whether it is still the one we mean, and who it must die with."""

import ctypes
import os
import signal
import sys
from pathlib import Path

IS_LINUX: bool = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1


def start_time_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: with the pid it names one process for ever.

    0 when there is no such process (a zombie counts as none) or, outside Linux, when it can't be known.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_same_process(pid: int, start_time: int) -> bool:
    """Return whether the process that had this pid and start time is alive."""
    if IS_LINUX:
        return start_time != 0 and start_time_of(pid) == start_time
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends. Elsewhere than on Linux: no-op.

    SIGKILL, not SIGTERM: a launcher that ends without stopping its children took NATS with it, so there is
    nothing left to drain into. Exits at once when the parent is gone already.
    """
    if not IS_LINUX:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the launcher that started this process is gone")
