"""kernels.cpp compiled for this CPU, once: the library is kept in the cache and used again until something changes.

A C++ compiler is not demanded of anybody: without one the engine computes the same by torch's own operators.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401 (brings the OpenMP that the library is bound to)

from services.cache_folder import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
TIMEOUT_S = 120

log = logging.getLogger(__name__)


class KernelsMissing(Exception):
    """There is no library, and why."""


@cache
def load_kernels() -> ctypes.CDLL:
    """Return the compiled kernels.cpp; the first call on a machine compiles it (3 s).

    Raises KernelsMissing: no Linux, no compiler ($CXX, or c++, g++, clang++), it failed, or the cache can't be written.
    """
    if sys.platform != "linux":
        raise KernelsMissing(f"not built on {sys.platform}: the threads are shared with torch's OpenMP on Linux only")
    compiler = _compiler()
    library = cache_folder() / "kernels" / f"{_fingerprint(compiler)}.so"
    try:
        if not library.is_file():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsMissing(f"{library} can't be made or loaded: {error}") from error


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = [shutil.which(name) for name in ([wanted] if wanted else COMPILERS)]
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise KernelsMissing(f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found")
    return compiler


def _fingerprint(compiler: str) -> str:
    """Return a digest of all that the library depends on: a home folder may be shared by machines that differ."""
    version = _run([compiler, "--version"])
    parts = (SOURCE.read_text(), " ".join(FLAGS), version, platform.machine(), _cpu_features())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Return the first CPU's features as the kernel names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(compiler: str, library: Path) -> None:
    """Put the library at its place in one step, so that workers starting together may all do it.

    It is linked without -fopenmp: OpenMP's functions are then found in the library that torch has loaded.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)
    log.info("compiled %s with %s", library, compiler)


def _run(command: list[str]) -> str:
    """Return what the command prints; raises KernelsMissing with its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsMissing(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise KernelsMissing(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
