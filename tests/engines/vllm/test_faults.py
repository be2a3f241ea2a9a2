"""An output of vLLM's that can't be read costs its own request. vLLM itself is not needed."""

import asyncio
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from schemas.frames import Failed, Finished, Tokens
from schemas.hop import PrefillDone, PrefillFailed
from schemas.ids import Epoch, WorkerId
from services.engines.adapter.tick import TickEmitter
from services.engines.paged.limits import Limits
from services.engines.protocol import EngineEvent
from services.engines.sim.card import builtin_card
from services.engines.tasks import spawner
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.site import Site
from services.engines.vllm.words import CoreGauges, CoreOutput, CoreSpec, LaunchOptions, PromptStats, StepReport
from tests.engines.paged.fleet import LocalLink, decode_leg, prefill_leg
from tests.engines.scenes import a_request

pytestmark = pytest.mark.usefixtures("no_leaks")

OPTIONS = LaunchOptions(
    model_path="/m",
    words=(),
    kv_role="kv_producer",
    kv_load_failure="fail",
    lease_s=6.0,
    side_channel_host="127.0.0.1",
)
SPEC = CoreSpec(
    version="0",
    block_size=16,
    num_blocks=100,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_context_tokens=200,
    kv_dtype="float32",
    kv_bytes_per_token=4,
    tp_size=1,
    pp_size=1,
    connector="NixlConnector",
    handshake="h",
    lease_s=6.0,
    has_priorities=False,
    has_kv_events=False,
)
LIMITS = Limits(num_blocks=100, block_size=16, max_num_seqs=4, max_batched_tokens=64, max_context_tokens=200)
PROMPT = PromptStats(computed=2, local_cache=0, external=0, queue_s=0.0, prefill_s=0.0)
UNREADABLE: Any = "no PromptStats"


class Scene:
    """A VllmEngine whose core is told what to do but does nothing; steps are the test's own."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.events: list[EngineEvent] = []
        self.engine = VllmEngine(builtin_card(), OPTIONS)
        self.site = self.engine._site = Site(
            worker=WorkerId("w"),
            epoch=Epoch(1),
            limits=LIMITS,
            link=LocalLink(),
            ticks=TickEmitter(self.events.extend),
            spawn=spawner(tasks),
            core=self.engine._core,
            spec=SPEC,
            policy="fail",
        )

    def decode(self) -> str:
        """Begin a decode leg that computes its prompt; return its id in the core."""
        self.engine.decode(decode_leg(a_request((1, 2), 3)))
        return list(self.site.by_core_id)[-1]

    def prefill(self) -> str:
        self.engine.prefill(prefill_leg(a_request((1, 2), 3)))
        return list(self.site.by_core_id)[-1]

    def step(self, *outputs: CoreOutput) -> None:
        report = StepReport(outputs=outputs, freed=(), num_expired=0, num_bytes=0, gauges=CoreGauges())
        self.engine._on_step(report)

    def of(self, core_id: str) -> list[EngineEvent]:
        """Return the events of the attempt whose request this is."""
        return [event for event in self.events if core_id.startswith(event.attempt_id)]  # type: ignore[union-attr]

    def orders(self) -> Iterator[tuple[str, str]]:
        """Yield what the core was told since: the verb and the request's id."""
        seen: list[tuple[str, str]] = []
        recorder: Any = SimpleNamespace(
            submit=lambda request: seen.append(("submit", request.id)),
            abort=lambda core_id: seen.append(("abort", core_id)),
            release=lambda core_id: seen.append(("release", core_id)),
        )
        commands = self.engine._core._commands
        while not commands.empty():
            commands.get_nowait()(recorder)
        yield from seen


async def test_the_other_decodes_of_the_step_get_theirs(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        bad, good = scene.decode(), scene.decode()
        with caplog.at_level(logging.ERROR):
            scene.step(
                CoreOutput(id=bad, token_ids=(8,), prompt=UNREADABLE),
                CoreOutput(id=good, token_ids=(8,), prompt=PROMPT),
            )
        scene.step(CoreOutput(id=good, token_ids=(9,), finish="stop"))
    (failed,) = scene.of(bad)
    assert isinstance(failed, Failed)
    assert failed.seq == 0
    assert "vLLM's output can't be read" in failed.error.message
    _, *tokens, end = scene.of(good)
    assert [one.token_ids for one in tokens if isinstance(one, Tokens)] == [(8,), (9,)]
    assert isinstance(end, Finished)
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert ("abort", bad) in list(scene.orders())
    assert scene.site.legs == {}


async def test_a_failure_at_the_end_names_the_tokens_that_were_delivered() -> None:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        core_id = scene.decode()
        scene.step(CoreOutput(id=core_id, token_ids=(8,), prompt=msgspec.structs.replace(PROMPT, computed=UNREADABLE)))
        scene.step(CoreOutput(id=core_id, token_ids=(9,), finish="stop"))
    delivered = [event for event in scene.of(core_id) if isinstance(event, Tokens)]
    failed = scene.of(core_id)[-1]
    assert isinstance(failed, Failed)
    assert failed.seq == sum(len(one.token_ids) for one in delivered) == 2


async def test_a_prefill_whose_handoff_cant_be_read_holds_no_kv() -> None:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        bad, good = scene.prefill(), scene.prefill()
        scene.step(
            CoreOutput(id=bad, token_ids=(8,), finish="length", prompt=PROMPT, kv_transfer_params={"blocks": object()}),
            CoreOutput(id=good, token_ids=(8,), finish="length", prompt=PROMPT, kv_transfer_params={"blocks": [1]}),
        )
    assert [type(event) for event in scene.of(bad)] == [PrefillFailed]
    assert [type(event) for event in scene.of(good)] == [PrefillDone]
    assert ("release", bad) in list(scene.orders())
    attempts = {event.attempt_id: isinstance(event, PrefillDone) for event in scene.events}  # type: ignore[union-attr]
    for attempt_id, is_held in attempts.items():
        assert (scene.site.held.check(attempt_id) is None) == is_held
        assert (scene.site.held.revoke(attempt_id, time.monotonic()) is not None) == is_held
