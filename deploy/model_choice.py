"""Which model a worker serves: from what the user called it to a served name and a folder."""

from pathlib import Path

import msgspec

from deploy.errors import UsageError
from services.config import WorkerConfig

SIM_MODEL = "sim"


def with_model(config: WorkerConfig) -> WorkerConfig:
    """Return the config with `model` and `model_path` filled in, fetching a catalogued model if need be.

    A folder is served under its name. The sim engine needs no files: without a model it serves its built-in one, and
    an unknown name is only a name. Raises UsageError when the torch engine's model can't be had.
    """
    if config.model_path:
        return msgspec.structs.replace(config, model=config.model or Path(config.model_path).resolve().name)
    if config.engine == "sim" and not config.model:
        return msgspec.structs.replace(config, model=SIM_MODEL)

    from deploy.models.catalogue import DEFAULT_MODEL, ModelError, find
    from deploy.models.resolve import resolve_model

    wanted = config.model or DEFAULT_MODEL
    known = find(wanted)
    is_folder = Path(wanted).expanduser().is_dir()
    if config.engine == "sim" and known is None and not is_folder:
        return config
    try:
        path = resolve_model(wanted)
    except ModelError as error:
        raise UsageError(str(error)) from error
    name = known.name if known and not is_folder else path.name if is_folder else wanted
    return msgspec.structs.replace(config, model=name, model_path=str(path))
