"""A process the launcher keeps alive: started, its output relayed line by line, restarted when it dies, stopped."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from deploy.errors import CommandError
from deploy.restarts import GiveUp, Left, Restart, RestartPolicy, describe_exit

Say = Callable[[str, str], None]
OUTPUT_TAIL_S = 0.5
KILL_MARGIN_S = 5.0


class ChildGaveUpError(CommandError):
    """A child can't be kept alive."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `arguments` follow `python -m deploy.child_main`; `drain_s` is how long it may take to leave."""

    name: str
    arguments: tuple[str, ...]
    environ: dict[str, str]
    drain_s: float


class Child:
    """One supervised process. `say(name, line)` gets its output and what happens to it."""

    def __init__(self, spec: ChildSpec, say: Say) -> None:
        self.name = spec.name
        self.service = spec.arguments[0]
        self.is_ready = False
        self._spec = spec
        self._say = say
        self._policy = RestartPolicy()
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id now; 0 between two lives."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def was_ready(self) -> None:
        """Note that the process said it serves."""
        self.is_ready = True
        self._policy.was_ready()

    async def keep(self) -> None:
        """Run the process again and again until it leaves by itself or is stopped.

        Raises ChildGaveUpError when it can't be kept alive; cancelling kills it.
        """
        try:
            while not self._is_stopping.is_set():
                started = time.monotonic()
                self.is_ready = False
                code = await self._live_once()
                await self._after(code, time.monotonic() - started)
        finally:
            self._has_ended.set()

    async def stop(self) -> None:
        """Ask the process to leave and wait until it has; after its drain time it is killed. `keep` must be running."""
        self._is_stopping.set()
        self._signal(signal.SIGTERM)
        limit_s = self._spec.drain_s + KILL_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                await self._has_ended.wait()
        except TimeoutError:
            self._say(self.name, f"did not leave within {limit_s:.0f} s: killed")
            self.kill()
            await self._has_ended.wait()

    def kill(self) -> None:
        """End the process and whatever it started at once; it is not restarted."""
        self._is_stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """SIGTERM goes to the process, SIGKILL to its group: it leads one of its own."""
        if not (pid := self.pid):
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended just now
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)

    async def _after(self, code: int, ran_s: float) -> None:
        if self._is_stopping.is_set():
            return
        match self._policy.ended(code=code, ran_s=ran_s):
            case Left():
                self._say(self.name, "has left")
                self._is_stopping.set()
            case GiveUp(reason=reason):
                raise ChildGaveUpError(f"{self.name} can't be kept running: {reason}")
            case Restart(delay_s=delay_s):
                self._say(self.name, f"ended with {describe_exit(code)}; restart in {delay_s:.1f} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._is_stopping.wait()

    async def _live_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "deploy.child_main",
            *self._spec.arguments,
            env=self._spec.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's, who stops its children in order
        )
        self._process = process
        if self._is_stopping.is_set():  # it was asked to stop while it was being started
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as tasks:
                relay = tasks.create_task(self._relay(process), name=f"output of {self.name}")
                code = await process.wait()
                await asyncio.wait({relay}, timeout=OUTPUT_TAIL_S)
                relay.cancel()
            return code
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._say(self.name, line.decode(errors="replace"))
        if rest:
            self._say(self.name, rest.decode(errors="replace"))
