"""Where an external engine's worker runs, and how its own command line reaches it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bus.server import NatsServer
from deploy.engine_python import engine_python
from deploy.errors import UsageError
from deploy.settings import environment_of, resolve
from services.config import WorkerConfig
from services.engines.vllm import TESTED_VERSIONS
from tests.conformance.tiny_model import write_card

WORDS = ("--enforce-eager", "--kv-transfer-config", '{"kv_connector": "NixlPushConnector"}', "--name", "a b")


def a_python(folder: Path) -> Path:
    """Write a program that only says how it was called."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "called: $*"\nenv | grep -E "BUSWAY_WORKER_ENGINE_WORDS|^PYTHONPATH"\n')
    program.chmod(0o755)
    return program


def test_an_engine_that_isnt_here_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSWAY_CACHE", str(tmp_path))
    config = WorkerConfig(engine="vllm")
    assert engine_python(config) is None
    python = a_python(tmp_path / "engines" / f"vllm-{TESTED_VERSIONS[0]}")
    assert engine_python(config) == python
    assert engine_python(WorkerConfig(engine="sim")) is None


def test_a_python_that_isnt_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no program /nowhere/python"):
        engine_python(WorkerConfig(engine_python="/nowhere/python"))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", "vLLM is not installed in this Python environment: run deploy/engines/install.sh vllm"),
        ("trtllm", "pip install 'busway[trtllm]' on a machine with an NVIDIA GPU"),
    ],
)
def test_an_engine_that_is_nowhere_is_said_to_be_missing_and_how_to_get_it(
    tmp_path: Path, nats_server: NatsServer, engine: str, said: str
) -> None:
    words = ["worker", "--engine", engine, "--role", "both", "--model", str(write_card(tmp_path / "m"))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_")}
    environ |= {"BUSWAY_NATS_URL": nats_server.internal_url, "BUSWAY_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, "a supervisor would try again"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engines_own_words_survive_every_layer() -> None:
    given = resolve(toml={}, environ={}, flags={"worker": {"engine_words": list(WORDS)}}).settings
    assert given.worker.engine_words == WORDS
    again = resolve(toml={}, environ=environment_of(given), flags={}).settings
    assert again.worker.engine_words == WORDS
    typed = resolve(toml={}, environ={"BUSWAY_WORKER_ENGINE_WORDS": "--a 'b c' --d"}, flags={}).settings
    assert typed.worker.engine_words == ("--a", "b c", "--d")


def test_the_worker_moves_to_its_engines_python_with_all_its_settings(tmp_path: Path) -> None:
    python = a_python(tmp_path / "venv")
    words = ["worker", "--engine", "sim", "--id", "w1", "--engine-python", str(python), "--", *WORDS]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_")}
    environ["BUSWAY_NATS_URL"] = "nats://127.0.0.1:1"
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert "called: -m deploy.child_main worker w1" in done.stdout, done.stderr
    assert "NixlPushConnector" in done.stdout
    assert f"PYTHONPATH={Path(__file__).parents[2]}" in done.stdout, "it would run another checkout's busway"


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 1", "ended with exit code 1: it said nothing"), ("echo no busway >&2; exit 3", "exit code 3: no busway")],
)
def test_a_python_that_cant_be_the_worker_is_refused_with_its_command_and_exit_code(
    tmp_path: Path, script: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    words = ["worker", "--engine", "sim", "--engine-python", str(python)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_")}
    environ["BUSWAY_NATS_URL"] = "nats://127.0.0.1:1"
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, "a supervisor would try again"
    assert f"{python} -c" in done.stderr
    assert said in done.stderr
