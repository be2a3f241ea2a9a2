"""`busway replay`: a recorded trace against the router's policies, in virtual time on this machine."""

from pathlib import Path
from typing import Annotated

import typer

POLICIES = ("round_robin", "least_loaded", "kv")
ENGINE_MODELS = ("dynamo",)


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSON lines, or Azure CSV.", exists=True, dir_okay=False)],
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Number of prefill workers.")] = 4,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Number of decode workers.")] = 4,
    speed: Annotated[float, typer.Option("--speed", min=1e-6, help="How many times as fast requests come.")] = 1.0,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"{', '.join(POLICIES)}; repeatable, to compare (kv).")
    ] = None,
    engine_model: Annotated[
        str, typer.Option("--engine-model", help="dynamo: the simulated GPU of Dynamo's own replay.")
    ] = "dynamo",
    requests: Annotated[int, typer.Option("--requests", min=0, help="Only so many requests; 0: all.")] = 0,
    num_blocks: Annotated[int, typer.Option("--blocks", min=1, help="KV blocks of each worker.")] = 16384,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens of a KV block.")] = 64,
    bus_delay_ms: Annotated[float, typer.Option("--bus-delay-ms", min=0, help="Age of what the router hears.")] = 1.0,
    coalesce_ms: Annotated[float, typer.Option("--coalesce-ms", min=0, help="Load reports wait for news.")] = 5.0,
    temperature_ms: Annotated[float, typer.Option("--temperature-ms", min=0, help="kv: draw around the best.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Replay a trace through the router's own policy and index, on modelled workers, in virtual time."""
    from deploy.errors import UsageError

    chosen = policy or ["kv"]
    for name in chosen:
        if name not in POLICIES:
            raise UsageError(f"no policy {name!r} in a replay; there are {', '.join(POLICIES)}")
    if engine_model not in ENGINE_MODELS:
        raise UsageError(f"no engine model {engine_model!r}; there are {', '.join(ENGINE_MODELS)}")

    import msgspec

    from deploy.replay.prefill_worker import EngineSize
    from deploy.replay.router_side import RouterSettings
    from deploy.replay.simulation import Delays, Scene
    from deploy.replay.timing import DynamoTiming
    from deploy.replay.trace import TraceError, read_trace
    from services.router.kv_policy import KvSettings

    scene = Scene(
        num_prefill=prefill,
        num_decode=decode,
        router=RouterSettings(kv=KvSettings(temperature_s=temperature_ms / 1e3), seed=seed),
        size=EngineSize(num_blocks=num_blocks, block_size=block_size),
        timing=DynamoTiming(pool_tokens=num_blocks * block_size),
        delays=Delays(bus_s=bus_delay_ms / 1e3, coalesce_s=coalesce_ms / 1e3),
    )
    try:
        found = read_trace(trace, speed=speed, max_requests=requests)
    except TraceError as error:
        raise UsageError(str(error)) from error

    import time

    from deploy.replay.report import Run, print_runs, run_json
    from deploy.replay.simulation import Simulation

    runs = []
    for name in chosen:
        router = msgspec.structs.replace(scene.router, policy=name)
        start = time.perf_counter()
        outcome = Simulation(msgspec.structs.replace(scene, router=router)).run(found)
        runs.append(Run(policy=name, outcome=outcome, wall_s=time.perf_counter() - start))
    if json:
        shown = [run_json(run) for run in runs]
        print(msgspec.json.format(msgspec.json.encode(shown[0] if len(shown) == 1 else {"runs": shown})).decode())
    else:
        from rich.console import Console

        print_runs(Console(), f"{trace.name} at {speed:g}x on {prefill}P{decode}D", runs)
