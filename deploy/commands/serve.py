"""`busway serve` and `busway demo`: a whole stack on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands import options
from deploy.commands.options import settle, shared

if TYPE_CHECKING:
    from deploy.launcher import Use
    from deploy.runtime_file import RuntimeNote
    from deploy.settings import Resolved

QUESTION = "What is the capital of France? Answer in one sentence."


def serve(
    engine_words: options.EngineWords = None,
    model: options.Model = None,
    engine: options.Engine = None,
    prefill: Annotated[int | None, typer.Option("--prefill", help="Number of prefill workers (1).")] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="Number of decode workers (1).")] = None,
    both: Annotated[int | None, typer.Option("--both", help="Number of workers that do both (0).")] = None,
    handoff: options.Handoff = None,
    policy: options.Policy = None,
    host: options.Host = None,
    port: options.Port = None,
    nats_url: options.NatsUrl = None,
    engine_arg: options.EngineArgs = None,
    engine_python: options.EnginePython = None,
    transfer: options.Transfer = None,
    strict: options.Strict = None,
    namespace: options.Namespace = None,
    config: options.ConfigFile = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run everything on this machine: nats-server (unless --nats-url), gateway, router and workers."""
    flags = shared(nats_url=nats_url, namespace=namespace, log_level=log_level, log_format=log_format)
    flags["serve"] = {"prefill": prefill, "decode": decode, "both": both}
    flags["gateway"] = {"host": host, "port": port}
    flags["router"] = {"policy": policy, "is_strict": strict}
    flags["worker"] = {"engine": engine, "model": model, "handoff": handoff, "transfer": transfer}
    flags["worker"] |= {"engine_args": engine_arg, "is_strict": strict}
    flags["worker"] |= {"engine_words": engine_words or None, "engine_python": engine_python}
    resolved = _ready_to_serve(settle(config, flags, find_stack=False))

    import asyncio

    async def until_stopped(note: "RuntimeNote") -> None:
        _welcome(note)
        await asyncio.Event().wait()

    _run(resolved, until_stopped)


def demo(
    question: Annotated[str, typer.Argument()] = QUESTION,
    model: options.Model = None,
    engine: options.Engine = None,
    handoff: options.Handoff = None,
    engine_arg: options.EngineArgs = None,
    config: options.ConfigFile = None,
) -> None:
    """Start a stack on free ports, ask one question, print the answer and where its time went, and stop."""
    flags = shared(nats_url=None, namespace=None, log_level="warning")
    flags["gateway"] = {"port": 0}
    flags["worker"] = {"engine": engine, "model": model, "handoff": handoff, "engine_args": engine_arg}
    resolved = _ready_to_serve(settle(config, flags, find_stack=False))

    import asyncio

    async def ask_once(note: "RuntimeNote") -> None:
        from deploy.chat_client import ChatRequest
        from deploy.demo import answer_with_phases

        request = ChatRequest(url=note.gateway_url, model=note.model, question=question, max_tokens=64, temperature=0.0)
        print(await asyncio.to_thread(answer_with_phases, request), flush=True)

    _run(resolved, ask_once)


def _ready_to_serve(resolved: "Resolved") -> "Resolved":
    """Return the settings with the model's folder, fetched if need be, and show them."""
    import msgspec

    from deploy.display import describe
    from deploy.model_choice import with_model
    from deploy.settings import SECTIONS

    settings = msgspec.structs.replace(resolved.settings, worker=with_model(resolved.settings.worker))
    resolved = msgspec.structs.replace(resolved, settings=settings)
    for line in describe(resolved, tuple(SECTIONS)):
        print(f"config {line}", flush=True)
    return resolved


def _run(resolved: "Resolved", use: "Use") -> None:
    import uvloop

    from deploy.failures import in_words
    from deploy.launcher import run_stack
    from services.telemetry import setup_logging

    setup_logging(resolved.settings.log, service="busway")
    try:
        uvloop.run(run_stack(resolved.settings, use))
    except Exception as error:
        raise in_words(error, "serve") from error


def _welcome(note: "RuntimeNote") -> None:
    import os

    from deploy.display import mask
    from deploy.runtime_file import runtime_dir

    note_file = runtime_dir(os.environ) / f"{note.pid}.json"
    body = f'{{"model": "{note.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(
        f"\nReady. Ask it:\n\n"
        f"  curl {note.gateway_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
        f"NATS: {mask(note.nats_url)} (credentials: {note_file})\nCtrl-C stops all of it.\n",
        flush=True,
    )
