"""`busway gateway`, `router`, `worker`: one service each, in this process."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands import options
from deploy.commands.options import Flags, settle, shared

if TYPE_CHECKING:
    from deploy.service import ServiceName

Id = Annotated[str | None, typer.Option("--id", help="Name in discovery; a fresh one by default.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Topology: zone, rack, host; repeatable.")
]
Role = Annotated[str | None, typer.Option("--role", help="prefill, decode or both.")]


def gateway(
    host: options.Host = None,
    port: options.Port = None,
    id: Id = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run a gateway: the OpenAI API over HTTP and NATS."""
    flags = shared(nats_url=nats_url, namespace=namespace, log_level=log_level, log_format=log_format)
    _run("gateway", config, flags | {"gateway": {"host": host, "port": port, "id": id}})


def router(
    policy: options.Policy = None,
    strict: options.Strict = None,
    id: Id = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run a router: it picks the workers of each request."""
    flags = shared(nats_url=nats_url, namespace=namespace, log_level=log_level, log_format=log_format)
    _run("router", config, flags | {"router": {"policy": policy, "is_strict": strict, "id": id}})


def worker(
    engine_words: options.EngineWords = None,
    role: Role = None,
    engine: options.Engine = None,
    model: options.Model = None,
    handoff: options.Handoff = None,
    engine_arg: options.EngineArgs = None,
    engine_python: options.EnginePython = None,
    transfer: options.Transfer = None,
    id: Id = None,
    strict: options.Strict = None,
    label: Labels = None,
    metrics: options.MetricsListen = None,
    nats_url: options.NatsUrl = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run a worker: an engine that prefills, decodes or does both. It joins the running fleet by itself."""
    flags = shared(nats_url=nats_url, namespace=namespace, log_level=log_level, log_format=log_format)
    mine: dict[str, object] = {"role": role, "engine": engine, "model": model, "handoff": handoff}
    mine |= {"engine_args": engine_arg, "transfer": transfer, "id": id, "is_strict": strict, "labels": label}
    mine |= {"engine_words": engine_words or None, "engine_python": engine_python}
    mine |= {"metrics_listen": metrics}
    _run("worker", config, flags | {"worker": mine})


def _run(service: "ServiceName", config: Path | None, flags: Flags) -> None:
    resolved = settle(config, flags)
    from deploy.service import run_service

    run_service(resolved, service)
