"""What busway adds to SGLang's processes, as far as it needs no SGLang."""

import subprocess
import sys

from services.engines.sglang import plugin

SCENE = """
import multiprocessing, signal, sys, threading
from services.engines.sglang.plugin import end_engine

def scheduler():
    threading.excepthook = end_engine
    thread = threading.Thread(target=lambda: [][0], name="bootstrap")
    thread.start()
    thread.join()
    signal.pause()

signal.signal(signal.SIGQUIT, lambda number, frame: sys.exit("the worker was told"))
child = multiprocessing.get_context("fork").Process(target=scheduler, daemon=True)
child.start()
signal.sigtimedwait([], 30)
"""


def test_a_dead_thread_of_the_scheduler_is_told_to_the_worker() -> None:
    done = subprocess.run([sys.executable, "-c", SCENE], capture_output=True, text=True, timeout=60)
    assert "the worker was told" in done.stderr
    assert "thread bootstrap died" in done.stderr
    assert done.returncode == 1


def test_without_a_busway_worker_it_does_nothing(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv(plugin.MARK, raising=False)
    plugin.register()
    assert "sglang" not in sys.modules
