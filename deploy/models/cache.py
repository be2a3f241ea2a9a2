"""The cache folder: a model is there whole or not at all, however many processes fetch it at once."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.cache_folder import cache_folder

PROVENANCE_FILE = "busway.json"


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached folder was made from; a folder of another provenance is made anew."""

    source: str
    sha256: str
    license: str
    conversion: int


def models_root() -> Path:
    """Return where models are cached: `models` under $BUSWAY_CACHE, or under ~/.cache/busway."""
    return cache_folder() / "models"


def is_current(folder: Path, provenance: Provenance) -> bool:
    """Return whether `folder` was made from just this."""
    try:
        found = msgspec.json.decode((folder / PROVENANCE_FILE).read_bytes(), type=Provenance)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return found == provenance


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock file; a holder that dies lets go (flock)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(folder: Path, provenance: Provenance) -> Iterator[tuple[Path, Path]]:
    """Yield (new, scratch): fill `new`, and it becomes `folder` in one rename unless an error leaves the block.

    Call with the lock held: what an earlier, killed fetch of this model left behind is removed.
    """
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(stale)
    workshop = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        new, scratch = workshop / "new", workshop / "scratch"
        new.mkdir()
        scratch.mkdir()
        yield new, scratch
        (new / PROVENANCE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(provenance)))
        if folder.exists():
            folder.rename(workshop / "old")
        new.rename(folder)
    finally:
        shutil.rmtree(workshop)
