"""Real stacks: `busway serve` in processes of its own, with the default model in float32 on one thread a worker."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deploy.models import resolve_model
from tests.e2e.prompts import Reference

MODEL = "smollm2-135m-instruct"
TORCH_FLAGS = ("--model", MODEL, "--engine-arg", "dtype=float32", "--engine-arg", "threads=1")


@dataclass(frozen=True)
class Stack:
    """A running stack and how to reach it."""

    url: str
    nats_url: str
    client_url: str
    model: str
    env: dict[str, str]
    log: Path

    def status(self) -> dict[str, Any]:
        """Return `busway status --json`."""
        command = [sys.executable, "-m", "deploy.cli", "status", "--json"]
        done = subprocess.run(command, env=self.env, capture_output=True, check=True, timeout=20)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def get(self, path: str) -> str:
        """Return the body of GET path."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body.decode()

    def assert_idle(self, *, within_s: float = 10.0) -> None:
        """Fail unless every worker's running, waiting and held blocks return to zero."""
        end = time.monotonic() + within_s
        while True:
            workers = self.status()["workers"]
            busy = [w for w in workers if w["running"] or w["waiting"] or w["kv_blocks_used"]]
            if not busy:
                return
            assert time.monotonic() < end, f"still held after {within_s} s: {busy}"
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 90.0) -> None:
    """Return once serve says that all it started is ready: /ready alone is 200 with decode serving aggregated."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        if "Ready. Ask it" in log.read_text():
            assert urllib.request.urlopen(url + "/ready", timeout=2).status == 200
            return
        time.sleep(0.05)
    raise AssertionError(f"not ready within {limit_s} s:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def running_stack(folder: Path, *flags: str, model: str = MODEL) -> Iterator[Stack]:
    """Run `busway serve` with these flags for the time of the block; it must stop cleanly on SIGINT."""
    port = free_port()
    log = folder / "serve.log"
    env = {k: v for k, v in os.environ.items() if not k.startswith("BUSWAY_")} | {"XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-m", "deploy.cli", "serve", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        (note_file,) = (folder / "busway").glob("*.json")
        note = json.loads(note_file.read_text())
        yield Stack(
            url=f"http://127.0.0.1:{port}",
            nats_url=note["nats_url"],
            client_url=note["client_url"],
            model=model,
            env=env,
            log=log,
        )
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"serve did not stop:\n{log.read_text()[-4000:]}") from None
    assert code == 0, log.read_text()[-4000:]


@pytest.fixture(scope="session")
def model_path() -> Path:
    return resolve_model(MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Reference:
    return Reference(model_path)


@pytest.fixture(scope="module", params=["pull", "rendezvous"])
def disaggregated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1 prefill and 1 decode worker, in each handoff."""
    flags = ("--prefill", "1", "--decode", "1", "--handoff", request.param, *TORCH_FLAGS)
    with running_stack(tmp_path_factory.mktemp(request.param), *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker of role both."""
    flags = ("--prefill", "0", "--decode", "0", "--both", "1", *TORCH_FLAGS)
    with running_stack(tmp_path_factory.mktemp("both"), *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("sim"), "--engine", "sim", model="sim") as stack:
        yield stack
