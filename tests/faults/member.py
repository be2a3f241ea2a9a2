"""One service process of a stack: its start, its signals, its pause points, and what it says of itself."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from deploy.service import LAUNCHER_VARIABLE, ServiceName
from deploy.settings import Settings, environment_of
from tests.conftest import frozen, wait_until

EXIT_TIMEOUT_S = 20.0


class Member:
    """A gateway (g*), router (r*) or worker (p*, d*, b*). It dies with the test process, whatever happens."""

    def __init__(self, name: str, service: ServiceName, settings: Settings, folder: Path) -> None:
        self.name = name
        self.service = service
        self.settings = settings
        self.folder = folder
        self.exit_codes: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, again after it has ended."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_")}
        environ |= environment_of(self.settings)
        environ |= {"FAULTS_TASKS": str(self.folder / "tasks"), LAUNCHER_VARIABLE: str(os.getpid())}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.process", self.service, self.name],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        assert self._process is not None
        self._process.kill()
        self.exit_codes.append(self._process.wait())

    async def ended(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """Wait for the process to end by itself; return its exit code."""
        await wait_until(lambda: not self.is_running, timeout_s, lambda: f"{self.name} still runs: {self.log()}")
        assert self._process is not None
        self.exit_codes.append(self._process.returncode)
        return self._process.returncode

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Stand still (SIGSTOP) for the length of the block."""
        async with frozen(self.pid):
            yield

    @contextmanager
    def paused(self, point: str) -> Iterator[None]:
        """Hold whatever comes to this pause point for the length of the block."""
        pause = self.folder / f"{point}.pause"
        (self.folder / f"{point}.hit").unlink(missing_ok=True)
        pause.touch()
        try:
            yield
        finally:
            pause.unlink()

    @asynccontextmanager
    async def holding(self, point: str) -> AsyncIterator[None]:
        """As `paused`, where `frozen` may stand as well."""
        with self.paused(point):
            yield

    def hits(self, point: str) -> list[str]:
        """Return the attempts that came to a pause point since it was last armed."""
        hits = self.folder / f"{point}.hit"
        return hits.read_text().splitlines() if hits.exists() else []

    async def hit(self, point: str, number: int = 1, timeout_s: float = 15.0) -> list[str]:
        """Wait until so many attempts came to a pause point; return them."""
        await wait_until(
            lambda: len(set(self.hits(point))) >= number, timeout_s, lambda: f"{self.name} didn't come to {point}"
        )
        return self.hits(point)

    def break_engine(self) -> None:
        """Let the engine's thread die of an exception."""
        self.signal(signal.SIGUSR2)

    async def tasks(self) -> Counter[str]:
        """Return the asyncio tasks of the process by name."""
        answer = self.folder / "tasks"
        answer.unlink(missing_ok=True)
        self.signal(signal.SIGUSR1)
        await wait_until(answer.exists, 15.0, lambda: f"{self.name} doesn't tell its tasks")
        return Counter(answer.read_text().splitlines())

    def log(self) -> str:
        """Return the end of what the process wrote."""
        path = self.folder / "log"
        return path.read_text()[-4000:] if path.exists() else ""


async def all_ended(members: list[Member]) -> None:
    """Ask processes to leave, side by side, and wait; who doesn't is killed and is an error."""
    running = [member for member in members if member.is_running]
    for member in running:
        member.signal(signal.SIGTERM)
    async with asyncio.TaskGroup() as tasks:
        for member in running:
            tasks.create_task(member.ended())
