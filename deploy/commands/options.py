"""Flags that several commands share, and the way from flags to settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.runtime_file import RuntimeNote
    from deploy.settings import Resolved

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file; without it ./busway.toml is read if it is there.")
]
NatsUrl = Annotated[
    str | None,
    typer.Option("--nats-url", help="NATS to use (BUSWAY_NATS_URL); default: that of the newest stack running here."),
]
Namespace = Annotated[str | None, typer.Option("--namespace", help="Prefix of all subjects and buckets.")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="text or json.")]
Model = Annotated[str | None, typer.Option("--model", help="A catalogued name, a Hugging Face folder or owner/name.")]
Engine = Annotated[str | None, typer.Option("--engine", help="torch, sim, vllm or sglang.")]
Handoff = Annotated[str | None, typer.Option("--handoff", help="pull (after prefill) or rendezvous (meanwhile).")]
Transfer = Annotated[str | None, typer.Option("--transfer", help="What moves the KV cache: nixl or shm.")]
EngineArgs = Annotated[
    list[str] | None, typer.Option("--engine-arg", metavar="KEY=VALUE", help="Given to the engine; repeatable.")
]
EngineWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ENGINE FLAGS]", help="Given to an external engine (vllm, sglang) as they are.", show_default=False
    ),
]
EnginePython = Annotated[
    str | None, typer.Option("--engine-python", help="Python of the engine's own environment, with busway in it.")
]
MetricsListen = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Serve /metrics there, with the engine's own series."),
]
Policy = Annotated[str | None, typer.Option("--policy", help="round_robin, least_loaded, kv or queue.")]
Host = Annotated[str | None, typer.Option("--host", help="Address the gateway listens on.")]
Port = Annotated[int | None, typer.Option("--port", help="Port the gateway listens on; 0: a free one.")]
Strict = Annotated[
    bool | None, typer.Option("--strict/--no-strict", help="Refuse requests when no prefill worker lives.")
]
Flags = dict[str, dict[str, object]]


def shared(
    *, nats_url: str | None, namespace: str | None, log_level: str | None = None, log_format: str | None = None
) -> Flags:
    """Return the flags of every service as a layer of settings."""
    return {
        "nats": {"url": nats_url, "namespace": namespace},
        "log": {"level": log_level, "format": log_format},
    }


def settle(config: Path | None, flags: Flags, *, find_stack: bool = True) -> "Resolved":
    """Return the settings; with `find_stack`, NATS is that of the newest live stack when nothing else names one."""
    import os

    from deploy.settings import load_toml, resolve

    toml, toml_name = load_toml(config, os.environ)
    resolved = resolve(toml=toml, environ=os.environ, flags=flags, toml_name=toml_name)
    if find_stack and not resolved.settings.nats.url:
        return _with_running_stack(resolved)
    return resolved


def running_stack() -> "RuntimeNote | None":
    """Return the note of the newest live stack, if there is one."""
    import os

    from deploy.runtime_file import newest_note

    return newest_note(os.environ)


def _with_running_stack(resolved: "Resolved") -> "Resolved":
    import msgspec

    note = running_stack()
    if note is None:
        return resolved
    nats = msgspec.structs.replace(resolved.settings.nats, url=note.nats_url)
    origins = resolved.origins | {"nats.url": f"stack {note.pid}"}
    if "nats.namespace" not in origins:
        nats = msgspec.structs.replace(nats, namespace=note.namespace)
        origins["nats.namespace"] = f"stack {note.pid}"
    settings = msgspec.structs.replace(resolved.settings, nats=nats)
    return msgspec.structs.replace(resolved, settings=settings, origins=origins)
