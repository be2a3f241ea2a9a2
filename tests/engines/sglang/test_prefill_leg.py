"""A prefill leg and its decode worker: what each hears of the other's end. The engine under it is a stand-in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from schemas.handoff import BootstrapEndpoint, BootstrapInfo
from schemas.hop import PrefillFailed
from schemas.ids import Epoch, WorkerId
from schemas.peer import MeetRequest, Stranded, Verdict
from services.engines.prompt import prompt_digest
from services.engines.protocol import EngineEvent, EngineProfile
from services.engines.sglang import thread as thread_module
from services.engines.sglang.engine import SglangEngine
from services.engines.sim.card import builtin_card
from tests.conftest import wait_until
from tests.engines.paged.fleet import LocalLink, prefill_leg
from tests.engines.scenes import a_request
from tests.engines.sglang.spec import OPTIONS, SPEC

pytestmark = pytest.mark.usefixtures("no_leaks")

ENDPOINT = BootstrapEndpoint(host="127.0.0.1", port=9)
LEASE_S = 0.3
DECODE = (WorkerId("d"), Epoch(7))


class WaitsForDecode:
    """Takes requests and ends none, as SGLang's prefill side does until decode's has come."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.end = asyncio.Event()
        reader = SimpleNamespace(read_all=lambda: [])
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort, load_snapshot_reader=reader)

    async def async_generate(self, rid: str, **more: object) -> AsyncIterator[dict[str, Any]]:
        self.loop = asyncio.get_running_loop()
        self.begun.append(rid)
        return self._stream()

    def shutdown(self) -> None:
        self.end.set()

    def fail(self) -> None:
        """End all requests as SGLang ends one whose KV it couldn't send; from any thread."""
        self.loop.call_soon_threadsafe(self.end.set)

    def _abort(self, rid: str) -> None:
        self.end.set()

    async def _stream(self) -> AsyncIterator[dict[str, Any]]:
        await self.end.wait()
        yield {
            "output_ids": [],
            "meta_info": {"finish_reason": {"type": "abort", "message": "KV was not sent", "status_code": 500}},
        }


class MetLeg(NamedTuple):
    engine: SglangEngine
    served: WaitsForDecode
    link: LocalLink
    events: list[Any]

    @property
    def failures(self) -> list[PrefillFailed]:
        return [event for event in self.events if isinstance(event, PrefillFailed)]


@asynccontextmanager
async def met_leg(monkeypatch: pytest.MonkeyPatch, *, is_heard: bool) -> AsyncIterator[MetLeg]:
    """An engine with one prefill leg that its decode has met."""
    spec = msgspec.structs.replace(SPEC, endpoint=ENDPOINT, num_tokens=1600)
    served = WaitsForDecode()
    monkeypatch.setattr(thread_module, "start_engine", lambda options, address: (served, spec))
    engine = SglangEngine(builtin_card(), msgspec.structs.replace(OPTIONS, role="prefill"), lease_s=LEASE_S)
    events: list[EngineEvent] = []
    link = LocalLink()
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()
    request = a_request((5, 7), 3)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(
            engine.run(worker=WorkerId("p"), epoch=Epoch(1), peers=link, emit=events.extend, ready=ready.set_result)
        )
        await ready
        if is_heard:
            engine.peer_joined(*DECODE)
        room = BootstrapInfo(prefill_worker=WorkerId("p"), epoch=Epoch(1), room=77, endpoint=ENDPOINT)
        engine.prefill(prefill_leg(request, room))
        meeting = MeetRequest(
            attempt_id=request.attempt_id,
            room=77,
            epoch=Epoch(1),
            decode_worker=DECODE[0],
            decode_epoch=DECODE[1],
            num_tokens=2,
            prompt_digest=prompt_digest(request),
            block_ids=(),
        )
        assert await engine.answer(meeting) == Verdict(is_good=True)
        await wait_until(lambda: bool(served.begun))
        yield MetLeg(engine, served, link, events)
        run.cancel()


async def test_an_unheard_peer_has_a_leases_time_to_show_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death would never be told."""
    async with met_leg(monkeypatch, is_heard=False) as leg:
        await wait_until(lambda: bool(leg.failures))
        (failed,) = leg.failures
        assert failed.error.code == "worker_lost"
        assert "d shows no life" in failed.error.message
        await wait_until(lambda: leg.engine.load().waiting + leg.engine.load().num_held == 0)


@pytest.mark.parametrize("is_heard", [True, False], ids=["before", "while it waits"])
async def test_one_that_is_heard_is_waited_for_until_it_leaves(monkeypatch: pytest.MonkeyPatch, is_heard: bool) -> None:
    async with met_leg(monkeypatch, is_heard=is_heard) as leg:
        leg.engine.peer_joined(*DECODE)
        await asyncio.sleep(2 * LEASE_S)
        assert leg.failures == []
        leg.engine.peer_left(*DECODE)
        await wait_until(lambda: bool(leg.failures))
        assert "decode worker d is gone" in leg.failures[0].error.message


async def test_a_failure_within_sglang_is_told_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends within a second of hearing it: tests/conformance/test_sglang_rendezvous.py, on the real engine."""
    async with met_leg(monkeypatch, is_heard=True) as leg:
        leg.served.fail()
        await wait_until(lambda: bool(leg.failures))
        assert "KV was not sent" in leg.failures[0].error.message
        await wait_until(lambda: bool(leg.link.sent))
        worker, message = leg.link.sent[0]
        assert worker == DECODE[0]
        assert isinstance(message, Stranded)
        assert "KV was not sent" in message.error.message
