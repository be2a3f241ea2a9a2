"""`busway replay`: a recorded trace against the router's policies, in virtual time on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.replay.scene import Scene

POLICIES = ("round_robin", "least_loaded", "kv")
DYNAMO, TORCH = "dynamo", "torch"


def replay(
    trace: Annotated[
        Path, typer.Argument(help="Mooncake JSON lines, Azure CSV, Vidur CSV.", exists=True, dir_okay=False)
    ],
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Number of prefill workers.")] = 4,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Number of decode workers.")] = 4,
    speed: Annotated[float, typer.Option("--speed", min=1e-6, help="How many times as fast requests come.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-6, help="Requests a second, for a trace without times (1).")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"{', '.join(POLICIES)}; repeatable, to compare (kv).")
    ] = None,
    engine_model: Annotated[
        str,
        typer.Option(
            "--engine-model",
            help="dynamo: Dynamo's simulated engine and GPU. torch: busway's engine at the speed measured for "
            "SmolLM2-135M. Or a file of your own measurement (python -m deploy.bench.engine_model).",
        ),
    ] = DYNAMO,
    requests: Annotated[int, typer.Option("--requests", min=0, help="Only so many requests; 0: all.")] = 0,
    num_blocks: Annotated[
        int | None, typer.Option("--blocks", min=1, help="KV blocks of each worker (the engine model's).")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", min=1, help="Tokens of a KV block (the engine model's).")
    ] = None,
    bus_delay_ms: Annotated[float, typer.Option("--bus-delay-ms", min=0, help="Age of what the router hears.")] = 1.0,
    coalesce_ms: Annotated[float, typer.Option("--coalesce-ms", min=0, help="Load reports wait for news.")] = 5.0,
    temperature_ms: Annotated[float, typer.Option("--temperature-ms", min=0, help="kv: draw around the best.")] = 0.0,
    local_prefill: Annotated[
        bool, typer.Option("--local-prefill/--no-local-prefill", help="kv: prompts may stay on decode workers.")
    ] = False,
    max_local_tokens: Annotated[
        int, typer.Option("--max-local-tokens", min=0, help="Most uncached tokens of a prompt that stays.")
    ] = 1024,
    max_stolen_tokens: Annotated[
        int, typer.Option("--max-stolen-tokens", min=0, help="The same where streams are running.")
    ] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Replay a trace through the router's own policy and index, on modelled workers, in virtual time."""
    from deploy.errors import UsageError

    chosen = policy or ["kv"]
    for name in chosen:
        if name not in POLICIES:
            raise UsageError(f"no policy {name!r} in a replay; there are {', '.join(POLICIES)}")

    import msgspec

    from deploy.replay.router_side import RouterSettings
    from deploy.replay.scene import Delays
    from deploy.replay.trace import TraceError, read_trace
    from services.router.kv_policy import KvSettings
    from services.router.local_prefill import LocalSettings

    engines = _engines(engine_model, prefill, decode, num_blocks, block_size)
    local = LocalSettings(
        is_on=local_prefill,
        max_tokens=max_local_tokens,
        max_stolen_tokens=max_stolen_tokens,
        handoff_s=engines.handoff_s(bus_delay_ms / 1e3),
    )
    scene = msgspec.structs.replace(
        engines,
        router=RouterSettings(
            kv=KvSettings(temperature_s=temperature_ms / 1e3, local=local), seed=seed, transfer=engines.transfer_cost()
        ),
        delays=Delays(bus_s=bus_delay_ms / 1e3, coalesce_s=coalesce_ms / 1e3),
    )
    try:
        found = read_trace(trace, speed=speed, max_requests=requests, rate=rate, seed=seed)
    except TraceError as error:
        raise UsageError(str(error)) from error

    import time

    from deploy.replay.report import Run, peak_mib, print_runs, run_json
    from deploy.replay.simulation import Simulation

    runs = []
    for name in chosen:
        router = msgspec.structs.replace(scene.router, policy=name)
        start, cpu_start = time.perf_counter(), time.process_time()
        outcome = Simulation(msgspec.structs.replace(scene, router=router)).run(found)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        runs.append(Run(policy=name, outcome=outcome, wall_s=wall_s, cpu_s=cpu_s, peak_mib=peak_mib()))
    if json:
        shown = [run_json(run) for run in runs]
        print(msgspec.json.format(msgspec.json.encode(shown[0] if len(shown) == 1 else {"runs": shown})).decode())
    else:
        from rich.console import Console

        print_runs(Console(), f"{trace.name} at {speed:g}x on {prefill}P{decode}D ({engine_model})", runs)


def _engines(model: str, prefill: int, decode: int, num_blocks: int | None, block_size: int | None) -> "Scene":
    """Return the fleet of an engine model; raises UsageError for one that there isn't."""
    from deploy.errors import UsageError
    from deploy.replay.engine_model import TORCH_MODEL, EngineModelError, read_engine_model
    from deploy.replay.scene import EngineSize, Scene
    from deploy.replay.timing import DynamoTiming

    if model == DYNAMO:
        plain = EngineSize()
        size = EngineSize(num_blocks=num_blocks or plain.num_blocks, block_size=block_size or plain.block_size)
        timing = DynamoTiming(pool_tokens=size.num_blocks * size.block_size)
        return Scene(num_prefill=prefill, num_decode=decode, size=size, timing=timing)
    path = TORCH_MODEL if model == TORCH else Path(model)
    if not path.is_file():
        raise UsageError(f"no engine model {model!r}; there are {DYNAMO}, {TORCH} and files of your own")
    try:
        measured = read_engine_model(path)
    except EngineModelError as error:
        raise UsageError(str(error)) from error
    size = EngineSize(
        num_blocks=num_blocks or measured.size.num_blocks,
        block_size=block_size or measured.size.block_size,
        max_num_seqs=measured.size.max_num_seqs,
        max_batched_tokens=measured.size.max_batched_tokens,
    )
    return Scene(
        num_prefill=prefill,
        num_decode=decode,
        size=size,
        timing=measured.times,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        gb_per_s=measured.gb_per_s,
    )
