"""Which Python a worker's engine lives in. External engines pin half of the package index: each has a venv of its own,
busway installed beside it (deploy/engines/install.sh), and the worker's process moves there before it does anything.
"""

import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from deploy.errors import UsageError
from deploy.restarts import describe_exit
from deploy.settings import Settings, environment_of
from services.cache_folder import cache_folder
from services.config import WorkerConfig
from services.engines import sglang, vllm

CHECK_S = 60.0


class ExternalEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The packages that are this engine, any of them, and the versions whose venvs are looked for, best first."""

    packages: tuple[str, ...]
    versions: tuple[str, ...]


EXTERNAL: dict[str, ExternalEngine] = {
    "vllm": ExternalEngine(packages=vllm.PACKAGES, versions=vllm.TESTED_VERSIONS),
    "sglang": ExternalEngine(packages=sglang.PACKAGES, versions=sglang.TESTED_VERSIONS),
}


def move_to_engine(settings: Settings) -> None:
    """Become the same worker in its engine's Python, when that isn't this one; returns otherwise.

    The process stays the same (exec), all settings go with it by the environment, and so does this source tree: the
    environment was made once, perhaps by another checkout.

    Raises UsageError when that Python can't be this worker: once it has become it, nobody is left to say why it ended.
    """
    python = engine_python(settings.worker)
    if python is None or _prefix_of(python) == Path(sys.prefix).resolve():
        return
    environ = os.environ | environment_of(settings) | _same_source()
    _check(python, environ)
    words = [str(python), "-m", "deploy.child_main", "worker", settings.worker.id or settings.worker.role]
    os.execve(python, words, environ)


def engine_python(config: WorkerConfig) -> Path | None:
    """Return the Python that was asked for, or the cached venv of an engine that isn't installed here.

    Raises UsageError when the one asked for isn't there.
    """
    if config.engine_python:
        python = Path(config.engine_python).expanduser()
        if not os.access(python, os.X_OK):
            raise UsageError(f"worker.engine_python: there is no program {python}")
        return python.absolute()
    engine = EXTERNAL.get(config.engine)
    if engine is None or any(map(_is_installed, engine.packages)):
        return None
    venvs = (cache_folder() / "engines" / f"{config.engine}-{number}" for number in engine.versions)
    return next((python for venv in venvs if (python := venv / "bin" / "python").exists()), None)


def _check(python: Path, environ: dict[str, str]) -> None:
    """Raise UsageError, naming command and exit code, unless this Python starts and finds busway."""
    words = [str(python), "-c", "import deploy.child_main"]
    try:
        done = subprocess.run(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=CHECK_S,
        )
    except OSError as error:
        raise UsageError(f"worker.engine_python: {python} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise UsageError(f"worker.engine_python: `{shlex.join(words)}` hasn't ended in {CHECK_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        ended = f"`{shlex.join(words)}` ended with {describe_exit(done.returncode)}"
        raise UsageError(f"worker.engine_python: {ended}: {said or 'it said nothing'}")


def _same_source() -> dict[str, str]:
    """Return the PYTHONPATH that leads to this very busway; nothing when it is installed among other packages."""
    root = Path(__file__).resolve().parents[1]
    if root.is_relative_to(Path(sys.prefix).resolve()):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


def _prefix_of(python: Path) -> Path:
    """Return the venv of a Python: its own link is not followed, that leads to the system's."""
    return python.parent.parent.resolve()


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
