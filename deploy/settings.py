"""Where settings come from: flags over environment over TOML over defaults, into the frozen structs of services.config.

One section a struct. TOML has `[gateway] port = 8000`, the environment BUSWAY_GATEWAY_PORT=8000, the command line
--port 8000. Unknown keys are refused, with the nearest known one. Nothing else reads the environment for settings.
"""

import difflib
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from deploy.errors import UsageError
from services.config import BusConfig, GatewayConfig, RouterConfig, WorkerConfig
from services.telemetry import LogConfig

PREFIX = "BUSWAY_"
CONFIG_VARIABLE = "BUSWAY_CONFIG"
# BUSWAY_… variables that are no settings of a service: the config file, the model cache, the pid to die with.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "BUSWAY_CACHE", "BUSWAY_LAUNCHER_PID"})
DEFAULT_FILE = Path("busway.toml")

Layer = Mapping[str, Mapping[str, object]]
Count = Annotated[int, Meta(ge=0, le=256)]


class SettingsError(UsageError):
    """A setting that can't be used; the message names it, where it came from and what would be right."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers of each role the one-machine launcher starts."""

    prefill: Count = 1
    decode: Count = 1
    both: Count = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a process of busway can be told."""

    nats: BusConfig = BusConfig()
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    serve: ServeConfig = ServeConfig()
    log: LogConfig = LogConfig()


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and where each value that isn't a default came from ("gateway.port" -> "flag")."""

    settings: Settings
    origins: dict[str, str]


SECTIONS: dict[str, type[msgspec.Struct]] = {field.name: field.type for field in msgspec.structs.fields(Settings)}
FIELDS: dict[str, dict[str, Any]] = {
    section: {field.name: field.type for field in msgspec.structs.fields(struct)}
    for section, struct in SECTIONS.items()
}
VARIABLES: dict[str, tuple[str, str]] = {
    f"{PREFIX}{section}_{key}".upper(): (section, key) for section, fields in FIELDS.items() for key in fields
}


def resolve(*, toml: Layer, environ: Mapping[str, str], flags: Layer, toml_name: str = "busway.toml") -> Resolved:
    """Return the settings of these three layers, the last one winning; dict-valued settings merge key by key.

    Flags of value None were not given. Raises SettingsError naming key, section and the nearest known one.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    layers = ((toml_name, toml), ("environment", _environment_layer(environ)), ("flag", flags))
    for origin, layer in layers:
        for section, key, value in _entries(layer, origin):
            converted = _convert(section, key, value, origin)
            if isinstance(converted, dict):
                converted = values[section].get(key, {}) | converted
            values[section][key] = converted
            origins[f"{section}.{key}"] = origin
    return Resolved(settings=_build(values), origins=origins)


def load_toml(path: Path | None, environ: Mapping[str, str]) -> tuple[Layer, str]:
    """Return the layer of the given file, of $BUSWAY_CONFIG or of ./busway.toml where it exists, and its name."""
    named = path or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    chosen = named or DEFAULT_FILE
    if named is None and not chosen.exists():
        return {}, str(chosen)
    try:
        return tomllib.loads(chosen.read_text()), str(chosen)
    except OSError as error:
        raise SettingsError(f"can't read the config file {chosen}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{chosen} is not valid TOML: {error}") from error


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the variables from which `resolve` makes these settings again: how the launcher tells its children."""
    return {
        variable: _as_text(getattr(getattr(settings, section), key)) for variable, (section, key) in VARIABLES.items()
    }


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    layer: dict[str, dict[str, object]] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in VARIABLES:
            known = [*VARIABLES, *OTHER_VARIABLES]
            raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, known)}")
        section, key = VARIABLES[variable]
        layer.setdefault(section, {})[key] = value
    return layer


def _entries(layer: Layer, origin: str) -> Iterator[tuple[str, str, object]]:
    for section, entries in layer.items():
        if section not in SECTIONS:
            raise SettingsError(f"unknown section [{section}] in {origin}{_nearest(section, list(SECTIONS))}")
        if not isinstance(entries, Mapping):
            raise SettingsError(f"[{section}] in {origin} must be a section, not a value")
        for key, value in entries.items():
            if key not in FIELDS[section]:
                raise SettingsError(
                    f"unknown key {key!r} in section [{section}] in {origin}{_nearest(key, list(FIELDS[section]))}"
                )
            if value is not None:
                yield section, key, value


def _convert(section: str, key: str, value: object, origin: str) -> Any:
    wanted = FIELDS[section][key]
    try:
        if get_origin(wanted) is dict:
            value = _as_pairs(value)
        elif get_origin(wanted) is tuple and isinstance(value, str):
            value = msgspec.json.decode(value) if value.startswith("[") else shlex.split(value)
        return msgspec.convert(value, wanted, strict=False)
    except (msgspec.DecodeError, SettingsError, ValueError) as error:
        allowed = f"; allowed: {', '.join(get_args(wanted))}" if get_origin(wanted) is Literal else ""
        raise SettingsError(f"{section}.{key} = {value!r} (from {origin}): {error}{allowed}") from error


def _as_pairs(value: object) -> dict[str, str]:
    """Return a mapping of strings from a TOML table, JSON text, `k=v,k=v`, or a list of `k=v`."""
    if isinstance(value, str) and value.startswith("{"):
        value = msgspec.json.decode(value)
    if isinstance(value, str):
        value = [pair for pair in value.split(",") if pair]
    if isinstance(value, list | tuple):
        pairs = [str(pair).partition("=") for pair in value]
        if any(not name or not mark for name, mark, _ in pairs):
            raise SettingsError("must be written as key=value")
        return {name.strip(): text for name, _, text in pairs}
    if isinstance(value, Mapping):
        return {str(name): _as_text(entry) for name, entry in value.items()}
    raise SettingsError("must be a table of key = value")


def _build(values: dict[str, dict[str, Any]]) -> Settings:
    if values["worker"].get("engine") == "sim":  # its KV bytes are in host memory, and NIXL may not be installed
        values["worker"].setdefault("transfer", "shm")
    return msgspec.convert(values, Settings)


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"
