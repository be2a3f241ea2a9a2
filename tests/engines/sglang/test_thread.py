"""The engine's thread, over an engine that forgets as SGLang does."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.engines.sglang import thread as thread_module
from services.engines.sglang.thread import EngineThread
from services.engines.sglang.words import Gauges, Output, Submission
from tests.conftest import wait_until
from tests.engines.sglang.spec import OPTIONS, SPEC


class FakeEngine:
    """A request runs until it is aborted; an abort of one that hasn't begun is ignored."""

    def __init__(self) -> None:
        self.known: dict[str, asyncio.Event] = {}
        self.loads: list[Any] = []
        self.is_shut_down = False
        self.tokenizer_manager = SimpleNamespace(
            abort_request=self._abort, load_snapshot_reader=SimpleNamespace(read_all=lambda: self.loads[-1:])
        )

    async def async_generate(self, rid: str, **more: object) -> AsyncIterator[dict[str, Any]]:
        return self._stream(rid)

    def shutdown(self) -> None:
        self.is_shut_down = True

    async def _stream(self, rid: str) -> AsyncIterator[dict[str, Any]]:
        ended = self.known[rid] = asyncio.Event()
        await ended.wait()
        yield {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "aborted"}}}

    def _abort(self, rid: str) -> None:
        if rid in self.known:
            self.known[rid].set()


class Running:
    """A started thread and what it told."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.thread = EngineThread(OPTIONS)
        self.outputs: list[Output] = []
        self.gauges: list[Gauges] = []

    async def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(thread_module, "start_engine", lambda options, address: (self.engine, SPEC))
        await self.thread.start(self.outputs.extend, self.gauges.append, lambda changes, num_blocks: None)


async def test_an_abort_right_behind_its_request_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    await running.start(monkeypatch)
    running.thread.submit(Submission(rid="r", token_ids=[1], sampling={}))
    running.thread.abort("r")
    await wait_until(lambda: bool(running.outputs))
    assert [output.is_last for output in running.outputs] == [True]
    await running.thread.stop()
    assert running.engine.is_shut_down


async def test_the_schedulers_reports_are_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    await running.start(monkeypatch)
    report = {"num_used_tokens": 32, "total_prefill_uncached_tokens": 30, "total_prefill_busy_us": 5}
    running.engine.loads.append(SimpleNamespace(timestamp=1.0, **report))
    await wait_until(lambda: bool(running.gauges))
    running.engine.loads.append(SimpleNamespace(timestamp=2.0, **report))
    await wait_until(lambda: len(running.gauges) == 2)
    assert running.gauges[0] == Gauges(num_used_tokens=32, num_computed_tokens=30, computing_us=5, num_reports=1)
    assert running.gauges[1].num_reports == 2, "the same again is progress, too"
    await running.thread.stop()
