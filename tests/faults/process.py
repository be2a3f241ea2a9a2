"""A service as these tests run it: `python -m tests.faults.process gateway|router|worker NAME`, set by the environment.

It is what `busway serve` starts, and more. At SIGUSR1 it writes the names of its asyncio tasks, one a line, to the
file that $FAULTS_TASKS names: so a test sees that nothing was left running in a process that it can't look into. At
SIGUSR2 its engine's thread dies of an exception.
"""

import asyncio
import ctypes
import os
import signal
import threading
from pathlib import Path

from deploy.child_main import main


def write_tasks(signum: int, frame: object) -> None:
    """Write the names of this loop's tasks; the file appears whole."""
    target = Path(os.environ["FAULTS_TASKS"])
    names = sorted(map(_name, asyncio.all_tasks()))
    draft = target.with_suffix(".draft")
    draft.write_text("\n".join(names))
    draft.replace(target)


def break_engine(signum: int, frame: object) -> None:
    """Raise in the engine's thread, at the next line of Python that it runs."""
    (thread,) = [one for one in threading.enumerate() if one.name == "engine"]
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(RuntimeError))


def _name(task: "asyncio.Task[object]") -> str:
    name = task.get_name()
    return task.get_coro().__qualname__ if name.startswith("Task-") else name  # type: ignore[union-attr]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    signal.signal(signal.SIGUSR2, break_engine)
    main()
