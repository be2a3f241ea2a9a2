"""From what a user calls a model to a folder: a path, a catalogued name, or a Hugging Face repository."""

from importlib.util import find_spec
from pathlib import Path

from deploy.models.catalogue import CATALOGUE, ModelError, find
from deploy.models.fetch import fetch_model

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def resolve_model(name_or_path: str) -> Path:
    """Return the folder of a model, fetching it if need be.

    Tried in this order: an existing folder; a catalogued name; a Hugging Face repository `owner/name`, from its local
    cache or else the network, when huggingface_hub is installed. Raises ModelError saying what was tried.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if find(name_or_path) is not None:
        return fetch_model(name_or_path)
    reasons = ["no such folder", "not one of " + ", ".join(model.name for model in CATALOGUE)]
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        snapshot = _snapshot(name_or_path)
        if isinstance(snapshot, Path):
            return _checked(snapshot)
        reasons.append(snapshot)
    raise ModelError(f"model {name_or_path!r} not found: {'; '.join(reasons)}")


def _checked(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} is no Hugging Face model folder: it lacks {' and '.join(missing)}")
    return folder.resolve()


def _snapshot(repository: str) -> Path | str:
    """Return the repository's local snapshot, downloading it if need be, or the reason why there is none."""
    if find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed"
    from huggingface_hub import snapshot_download

    reason = ""
    for is_local in (True, False):
        try:
            return Path(snapshot_download(repository, allow_patterns=list(HUB_FILES), local_files_only=is_local))
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"Hugging Face: {str(error).splitlines()[0]}"
    return reason
