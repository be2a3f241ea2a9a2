"""A whole stack on one machine: NATS, gateway, router and workers, each a process of its own, started side by side,
kept alive, and stopped in order. The note it leaves lets the other commands find it.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from deploy.child import Child, ChildSpec, Say
from deploy.errors import CommandError
from deploy.nats_keeper import nats_for
from deploy.ready_socket import ready_socket
from deploy.runtime_file import RuntimeNote, remove_note, runtime_dir, write_note
from deploy.service import LAUNCHER_VARIABLE
from deploy.settings import Settings, environment_of
from schemas.worker import Role

READY_POLL_S = 0.02
READY_TIMEOUT_S = 2.0
WAITING_NOTICE_S = 10.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Use = Callable[[RuntimeNote], Awaitable[None]]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The children in the order in which they are stopped: each group leaves before the next is asked to."""

    gateways: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]
    routers: tuple[ChildSpec, ...]


def plan(settings: Settings, environ: dict[str, str]) -> Plan:
    """Return what to run. Settings go by the environment, so that no credential shows in `ps`.

    On a NATS that other stacks may share, ids get a suffix of this stack's own.
    """
    suffix = f"-{secrets.token_hex(2)}" if settings.nats.url else ""

    def child(id: str, service: str, *words: str, drain_s: float, **more: str) -> ChildSpec:
        own = {f"BUSWAY_{service}_{key}".upper(): value for key, value in (("id", id), *more.items())}
        return ChildSpec(name=id, arguments=(service, *words, id), environ=environ | own, drain_s=drain_s)

    return Plan(
        gateways=(child(settings.gateway.id or f"gateway-0{suffix}", "gateway", drain_s=settings.gateway.drain_s),),
        workers=tuple(
            child(f"{role}-{index}{suffix}", "worker", role, role=role, drain_s=settings.worker.drain_s)
            for role, number in msgspec.structs.asdict(settings.serve).items()
            for index in range(number)
        ),
        routers=(child(settings.router.id or f"router-0{suffix}", "router", drain_s=settings.router.drain_s),),
    )


def missing_role(settings: Settings) -> Role | None:
    """Return the role that has to join from elsewhere before these workers can answer, None when they can."""
    serve = settings.serve
    if serve.both or (serve.prefill and serve.decode):
        return None
    if serve.decode:
        return "prefill" if settings.worker.is_strict or settings.router.is_strict else None
    return "decode" if serve.prefill else "both"


class Stack:
    """The running children. `stop_asked` is set by a signal, by a child that can't be kept, or by the user's end.
    `missing`: the role without which nothing is answered, for others to bring."""

    def __init__(self, groups: Iterable[tuple[ChildSpec, ...]], say: Say, missing: Role | None = None) -> None:
        self.groups = [[Child(spec, say) for spec in group] for group in groups]
        self.stop_asked = asyncio.Event()
        self.failure: Exception | None = None
        self.gateway_url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._say = say
        self._missing = missing

    @property
    def children(self) -> list[Child]:
        return [child for group in self.groups for child in group]

    def heard(self, message: dict[str, str]) -> None:
        """Take a child's message on the notify socket."""
        if message.get("READY") != "1":
            return
        child = next((child for child in self.children if str(child.pid) == message.get("MAINPID")), None)
        if child is None:
            return
        child.was_ready()
        if child.service == "gateway" and not self.gateway_url.done():
            self.gateway_url.set_result(message.get("STATUS", ""))

    def on_signal(self) -> None:
        """Stop in order; at the second signal kill."""
        if self.stop_asked.is_set():
            self._say("busway", "killing everything")
            self._fail(CommandError("killed before everything in flight had ended"))
            for child in self.children:
                child.kill()
        else:
            self._say("busway", "stopping; once more to kill")
            self.stop_asked.set()

    async def keep(self, child: Child) -> None:
        """Keep a child alive; when that can't be done the stack stops."""
        try:
            await child.keep()
        except Exception as error:
            self._fail(error)

    async def use(self, note: RuntimeNote, folder: Path, use: Use) -> None:
        """Wait until requests are answered, then call `use`; the stack stops when it returns or raises.

        The note in `folder` names the gateway as soon as it listens.
        """
        try:
            url = await self.gateway_url
            note = msgspec.structs.replace(note, gateway_url=url)
            write_note(folder, note)
            await self._wait_for_answers(url)
            await use(note)
        except Exception as error:
            self._fail(error)
        self.stop_asked.set()

    async def stop(self) -> None:
        """Stop group after group, each side by side; bounded by their drain times."""
        for group in self.groups:
            async with asyncio.TaskGroup() as tasks:
                for child in group:
                    tasks.create_task(child.stop(), name=f"stop {child.name}")

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop_asked.set()

    async def _wait_for_answers(self, url: str) -> None:
        """Return when every child has said that it serves and the gateway sees a complete path for each model."""
        loop = asyncio.get_running_loop()
        awaited = "the gateway to see the workers"
        if self._missing is not None:
            awaited = (
                f"a worker of role {self._missing} to join: `busway worker --role {self._missing}` with the same model"
            )
            self._say("busway", f"no request can be answered yet: waiting for {awaited}")
        notice = loop.time() + WAITING_NOTICE_S
        while (late := [child.name for child in self.children if not child.is_ready]) or not await _is_ready(url):
            if loop.time() > notice:
                self._say("busway", f"waiting for {', '.join(late) or awaited}")
                notice += WAITING_NOTICE_S
            await asyncio.sleep(READY_POLL_S)


async def run_stack(settings: Settings, use: Use) -> None:
    """Run a stack until `use` returns or a signal comes; then stop it, leaving no process and no file behind.

    Raises the error that ended it, if one did.
    """
    async with contextlib.AsyncExitStack() as context:
        say = _printer()
        note = await context.enter_async_context(nats_for(settings, say))
        folder = runtime_dir(os.environ)
        context.callback(remove_note, folder)
        write_note(folder, note)
        scratch = context.enter_context(tempfile.TemporaryDirectory(prefix="busway-"))
        environ = _child_environ(settings, note, Path(scratch) / "notify")
        stack = Stack(msgspec.structs.astuple(plan(settings, environ)), say, missing_role(settings))
        context.enter_context(ready_socket(Path(scratch) / "notify", stack.heard))
        await _run(stack, note, folder, use)
    if stack.failure:
        raise stack.failure


async def _run(stack: Stack, note: RuntimeNote, folder: Path, use: Use) -> None:
    with _signals(stack.on_signal):
        async with asyncio.TaskGroup() as tasks:
            for child in stack.children:
                tasks.create_task(stack.keep(child), name=f"keep {child.name}")
            user = tasks.create_task(stack.use(note, folder, use), name="use of the stack")
            await stack.stop_asked.wait()
            user.cancel()
            await stack.stop()


def _child_environ(settings: Settings, note: RuntimeNote, notify_socket: Path) -> dict[str, str]:
    nats = msgspec.structs.replace(settings.nats, url=note.nats_url)
    return {
        **os.environ,
        **environment_of(msgspec.structs.replace(settings, nats=nats)),
        LAUNCHER_VARIABLE: str(os.getpid()),
        "NOTIFY_SOCKET": str(notify_socket),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def _signals(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _printer() -> Say:
    """Return what writes a child's line to stderr behind its name, coloured on a terminal."""
    is_terminal = sys.stderr.isatty()

    def say(name: str, line: str) -> None:
        colour = 31 + sum(name.encode()) % 6
        label = f"\x1b[{colour}m{name:<10}\x1b[0m" if is_terminal else f"{name:<10}"
        sys.stderr.write(f"{label} | {line}\n")
        sys.stderr.flush()

    return say


async def _is_ready(url: str) -> bool:
    """Return whether GET /ready says 200. By hand: urllib.request would cost the start a tenth of a second."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        with contextlib.closing(writer):
            writer.write(f"GET /ready HTTP/1.0\r\nhost: {parts.netloc}\r\n\r\n".encode())
            async with asyncio.timeout(READY_TIMEOUT_S):
                status_line = await reader.readline()
    except (OSError, TimeoutError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]
