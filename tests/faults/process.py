"""A service as these tests run it: `python -m tests.faults.process gateway|router|worker NAME`, settings in the environment.

It is what `busway serve` starts, and more: at SIGUSR1 it writes the names of its asyncio tasks, one a line, to the
file that $FAULTS_TASKS names. So a test sees that nothing was left running in a process that it can't look into.
"""

import asyncio
import os
import signal
from pathlib import Path

from deploy.child_main import main


def write_tasks(signum: int, frame: object) -> None:
    """Write the names of this loop's tasks; the file appears whole."""
    target = Path(os.environ["FAULTS_TASKS"])
    names = sorted(map(_name, asyncio.all_tasks()))
    draft = target.with_suffix(".draft")
    draft.write_text("\n".join(names))
    draft.replace(target)


def _name(task: "asyncio.Task[object]") -> str:
    name = task.get_name()
    return task.get_coro().__qualname__ if name.startswith("Task-") else name  # type: ignore[union-attr]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    main()
