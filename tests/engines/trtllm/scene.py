"""TensorRT-LLM engines of one process, over the stand-in (stand_in.py says what that is and isn't)."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from schemas.hop import PrefillDone
from schemas.ids import Epoch, WorkerId
from schemas.model_card import ModelCard
from schemas.request import GenerateRequest
from services.config import RoleName
from services.engines.protocol import EngineEvent, EngineProfile
from services.engines.sim.card import builtin_card
from services.engines.trtllm.args import llm_kwargs
from services.engines.trtllm.engine import TrtllmEngine
from tests.engines.paged.fleet import Host, LocalLink, prefill_leg
from tests.engines.trtllm.stand_in import StandInLlm, stand_in_api
from tests.engines.trtllm.stand_in_executor import Executor, Fabric

CARD = builtin_card()
TRANSCEIVER = '{"backend": "NIXL", "kv_transfer_timeout_ms": 60000}'
# For tests in which nobody fetches the KV: elsewhere a busy machine would let it pass.
SOON = {"cache_transceiver_config": TRANSCEIVER.replace("60000", "300")}
ENGINE_ARGS = {"cache_transceiver_config": TRANSCEIVER, "max_seq_len": "400"}


class Seat:
    """One engine of a scene: what its worker sees (`host`) and the stand-in under it (`llm`)."""

    def __init__(self, host: Host, llm: StandInLlm, run: "asyncio.Task[None]") -> None:
        self.host = host
        self.llm = llm
        self.run = run

    @property
    def engine(self) -> TrtllmEngine:
        engine: Any = self.host.engine
        return engine

    @property
    def executor(self) -> Executor:
        return self.llm.executor

    def is_empty(self) -> bool:
        return self.host.is_empty() and self.executor.num_used_blocks() == 0

    async def until_empty(self) -> None:
        """Wait until neither the engine nor the stand-in holds anything."""
        await self.host.until(self.is_empty)
        assert self.executor.aborts_in_transfer == []

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        self.executor.paused.add(phase)
        try:
            yield
        finally:
            self.executor.paused.discard(phase)


class Scene:
    """Engines that reach each other; `p` and `d` where they are named so."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.link = LocalLink()
        self.seats: dict[str, Seat] = {}

    def __getitem__(self, name: str) -> Seat:
        return self.seats[name]

    async def until_empty(self) -> None:
        for seat in self.seats.values():
            await seat.until_empty()


def make_engine(
    fabric: Fabric,
    role: RoleName,
    *,
    kv_load_failure: Literal["recompute", "fail"] = "fail",
    engine_args: dict[str, str] | None = None,
    card: ModelCard = CARD,
    **switches: Any,
) -> TrtllmEngine:
    kwargs = llm_kwargs(ENGINE_ARGS | (engine_args or {}), role=role, model_path="/models/stand-in")
    return TrtllmEngine(stand_in_api(fabric, **switches), kwargs, card, kv_load_failure=kv_load_failure)


@asynccontextmanager
async def seated(scene: Scene, name: str, **options: Any) -> AsyncIterator[Seat]:
    """Run an engine until the end of the block; what its run raises is in `seat.run`."""
    role: RoleName = {"p": "prefill", "d": "decode"}.get(name[0], "both")  # type: ignore[assignment]
    engine = make_engine(scene.fabric, role, **options)
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
    epoch = Epoch(time.time_ns())
    hosts: list[Host] = []

    def emit(events: Sequence[EngineEvent]) -> None:
        hosts[0].emit(events)

    run = asyncio.get_running_loop().create_task(
        engine.run(worker=WorkerId(name), epoch=epoch, peers=scene.link, emit=emit, ready=ready.set_result)
    )
    await asyncio.wait([ready, run], return_when=asyncio.FIRST_COMPLETED)
    if run.done():
        run.result()
    hosts.append(Host(name, engine, scene.link, ready.result(), epoch))  # type: ignore[arg-type]
    scene.link.engines[WorkerId(name)] = engine  # type: ignore[assignment]
    seat = scene.seats[name] = Seat(hosts[0], scene.fabric.llms[-1], run)
    try:
        yield seat
    finally:
        del scene.link.engines[WorkerId(name)]
        run.cancel()
        await asyncio.wait([run])
        assert seat.executor.is_shut_down


@asynccontextmanager
async def scene_of(**options: Any) -> AsyncIterator[Scene]:
    """A prefill engine `p`, a decode engine `d` and an aggregated one `both`, alike but for their roles."""
    scene = Scene()
    async with seated(scene, "p", **options), seated(scene, "d", **options), seated(scene, "both", **options):
        yield scene


async def handed_over(seat: Seat, request: GenerateRequest) -> PrefillDone:
    """Prefill, and return the handoff."""
    seat.engine.prefill(prefill_leg(request))
    result = await seat.host.result(request.attempt_id)
    assert isinstance(result, PrefillDone), result
    return result
