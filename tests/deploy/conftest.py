"""`busway serve` and other commands as processes of their own, in a home of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

BUSWAY = (sys.executable, "-m", "deploy.cli")
LIMIT_S = 30.0


def _until(predicate: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Return the predicate's first true value; fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (value := predicate()):
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)
    return value


class Home:
    """A user's machine: commands run here see only stacks started here."""

    until = staticmethod(_until)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_")}
        self.env |= {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder / "tmp"), "NO_COLOR": "1"}
        (folder / "tmp").mkdir()

    def start(self, *arguments: str, log: str = "serve.log") -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [*BUSWAY, *arguments], env=self.env, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BUSWAY, *arguments], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )

    @contextlib.contextmanager
    def serving(self, *flags: str) -> Iterator["Served"]:
        """Run `busway serve --engine sim` on a free port; whatever the test did, nothing is left of it afterwards."""
        served = Served(self, self.start("serve", "--engine", "sim", "--port", "0", *flags))
        try:
            served.wait_ready()
            yield served
        finally:
            served.end()

    def log(self, name: str = "serve.log") -> str:
        return (self.folder / name).read_text()

    def notes(self) -> list[Path]:
        return list((self.folder / "busway").glob("*"))

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        fleet: dict[str, Any] = json.loads(done.stdout)
        return fleet


class Served:
    """A running `busway serve` of the sim engine."""

    def __init__(self, home: Home, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.process = process

    def note(self) -> dict[str, Any]:
        (path,) = [path for path in self.home.notes() if path.suffix == ".json"]
        note: dict[str, Any] = json.loads(path.read_text())
        return note

    @property
    def url(self) -> str:
        return str(self.note()["gateway_url"])

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_ready(self) -> None:
        def has_said_so() -> bool:
            assert self.process.poll() is None, self.home.log()
            return "Ready. Ask it" in self.home.log()

        _until(has_said_so, "serve is ready")

    def answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def end(self) -> None:
        """Stop it if it still runs, and kill what does not stop."""
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *self.family()]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=LIMIT_S)


@pytest.fixture
def other_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("other"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def served(home: Home) -> Iterator[Served]:
    with home.serving() as served:
        yield served
