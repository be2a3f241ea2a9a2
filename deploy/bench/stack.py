"""A running busway stack, or its peer, with the CPU time of each of its processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """`processes` maps a part's name to its pids."""

    url: str
    model: str
    processes: dict[str, list[int]]

    def cpu_s(self) -> dict[str, float]:
        """Return the user and system seconds each part has used so far, all threads."""
        used = {}
        for part, pids in self.processes.items():
            times = [psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid)]
            used[part] = sum(t.user + t.system for t in times)
        return used

    def rss_mib(self) -> dict[str, float]:
        """Return the resident memory of each part."""
        return {
            part: sum(psutil.Process(pid).memory_info().rss for pid in pids if psutil.pid_exists(pid)) / 2**20
            for part, pids in self.processes.items()
        }


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_answers(url: str, path: str, process: subprocess.Popen[bytes], *, limit_s: float) -> None:
    """Poll until GET answers 200; raises RuntimeError when the process ends or the limit passes."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the stack ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if urllib.request.urlopen(url + path, timeout=2).status == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"{url}{path} did not answer 200 within {limit_s:.0f} s")


def part_of(process: psutil.Process) -> str | None:
    """Return which part a child of `busway serve` is, or None for the launcher's own helpers."""
    line = process.cmdline()
    if any("nats-server" in Path(word).name for word in line[:1]):
        return "nats"
    for part in ("gateway", "router"):
        if part in line:
            return part
    if "worker" in line:
        roles = [role for role in ("prefill", "decode", "both") if role in line]
        return roles[0] if roles else "worker"
    return None


def parts_of(pid: int) -> dict[str, list[int]]:
    """Return the pids of each part under a launcher."""
    found: dict[str, list[int]] = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (part := part_of(child)) is not None:
                found.setdefault(part, []).append(child.pid)
    return found


@contextlib.contextmanager
def busway_stack(*args: str, model: str, limit_s: float = 120) -> Iterator[Stack]:
    """Run `busway serve` with these flags on a free port for the time of the block."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deploy.cli", "serve", "--port", str(port), *args]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_answers(url, "/ready", process, limit_s=limit_s)
            yield Stack(url=url, model=model, processes=parts_of(process.pid))
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


@contextlib.contextmanager
def peer_stack(mode: str, *, mock_args: str = "") -> Iterator[Stack]:
    """Run NVIDIA Dynamo with its simulated engine, by the scripts that PEER_BENCH points to (see CONTRIBUTING)."""
    scripts, port = Path(os.environ["PEER_BENCH"]) / "dynamo", free_port()
    env = os.environ | {"HTTP_PORT": str(port)} | ({"MOCK_ARGS": mock_args} if mock_args else {})
    started = subprocess.run(
        ["bash", str(scripts / "start.sh"), mode], env=env, capture_output=True, text=True, check=True
    )
    words = started.stdout.split()
    pids = [word.split("=") for word in words if "=" in word]
    try:
        yield Stack(
            url=f"http://127.0.0.1:{port}",
            model="smollm2",
            processes={name: tree(int(pid)) for name, pid in pids},
        )
    finally:
        subprocess.run(["bash", str(scripts / "stop.sh")], env=env, check=True, capture_output=True)


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def has_peer() -> bool:
    """Say whether the peer is installed here."""
    bench, root = os.environ.get("PEER_BENCH"), os.environ.get("PEER_ROOT")
    return bool(bench and root and Path(root, "venv").is_dir() and Path(bench, "dynamo", "start.sh").is_file())
