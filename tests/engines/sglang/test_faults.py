"""An output of SGLang's that can't be read costs its own request. The engine under it is a stand-in."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from schemas.frames import Failed, Finished, Tokens
from schemas.ids import Epoch, WorkerId
from schemas.request import GenerateRequest
from services.engines.protocol import EngineEvent, EngineProfile
from services.engines.sglang import thread as thread_module
from services.engines.sglang.engine import SglangEngine
from services.engines.sim.card import builtin_card
from tests.conftest import wait_until
from tests.engines.paged.fleet import LocalLink, decode_leg
from tests.engines.scenes import a_request
from tests.engines.sglang.spec import OPTIONS, SPEC

pytestmark = pytest.mark.usefixtures("no_leaks")

NUM_TOKENS = 3
BAD = 1
MANY = msgspec.structs.replace(SPEC, max_context_tokens=200, num_tokens=1600)


class TokensInStep:
    """Serves requests in step, NUM_TOKENS each. What it says of the token `garbled_at` has `garbled` in it, where the
    prompt begins with BAD."""

    def __init__(self, garbled: dict[str, Any], garbled_at: int, num_requests: int) -> None:
        self.aborted: list[str] = []
        self._garbled = garbled
        self._garbled_at = garbled_at
        self._step = asyncio.Barrier(num_requests)
        reader = SimpleNamespace(read_all=lambda: [])
        self.tokenizer_manager = SimpleNamespace(abort_request=self.aborted.append, load_snapshot_reader=reader)

    async def async_generate(self, rid: str, input_ids: list[int], **more: object) -> AsyncIterator[dict[str, Any]]:
        return self._stream(is_bad=input_ids[0] == BAD)

    def shutdown(self) -> None:
        pass

    async def _stream(self, *, is_bad: bool) -> AsyncIterator[dict[str, Any]]:
        for number in range(NUM_TOKENS):
            await self._step.wait()
            reason = {"type": "length"} if number == NUM_TOKENS - 1 else None
            meta = {"finish_reason": reason, "cached_tokens": 0}
            chunk: dict[str, Any] = {"output_ids": [number], "meta_info": meta}
            if is_bad and number == self._garbled_at:
                for part in (chunk, chunk["meta_info"]):
                    part |= {key: value for key, value in self._garbled.items() if key in part}
            yield chunk


async def completions(
    served: TokensInStep, requests: Sequence[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> list[list[EngineEvent]]:
    """Return each request's events."""
    monkeypatch.setattr(thread_module, "start_engine", lambda options, address: (served, MANY))
    engine = SglangEngine(builtin_card(), OPTIONS, lease_s=1.0)
    events: list[EngineEvent] = []
    ready: asyncio.Future[EngineProfile] = asyncio.get_running_loop().create_future()

    def of(request: GenerateRequest) -> list[EngineEvent]:
        return [event for event in events if event.attempt_id == request.attempt_id]  # type: ignore[union-attr]

    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(
            engine.run(
                worker=WorkerId("w"), epoch=Epoch(1), peers=LocalLink(), emit=events.extend, ready=ready.set_result
            )
        )
        await ready
        for request in requests:
            engine.decode(decode_leg(request))
        await wait_until(
            lambda: all(any(isinstance(event, Finished | Failed) for event in of(one)) for one in requests)
        )
        assert not run.done()
        await wait_until(lambda: not engine.load().num_held)
        run.cancel()
    return [of(request) for request in requests]


@pytest.mark.parametrize(
    ("garbled", "garbled_at"),
    [({"output_ids": 5}, 1), ({"finish_reason": "length"}, 2), ({"cached_tokens": "many"}, 0)],
    ids=["ids", "reason", "count"],
)
async def test_the_others_of_the_step_get_theirs(
    garbled: dict[str, Any], garbled_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [a_request((first, 7), NUM_TOKENS) for first in (BAD, 5, 6)]
    served = TokensInStep(garbled, garbled_at, len(requests))
    with caplog.at_level(logging.ERROR):
        bad, *others = await completions(served, requests, monkeypatch)
    for events in others:
        tokens = [event for event in events if isinstance(event, Tokens)]
        assert [token_id for one in tokens for token_id in one.token_ids] == list(range(NUM_TOKENS))
        assert isinstance(events[-1], Finished)
    failed = bad[-1]
    assert isinstance(failed, Failed)
    assert "SGLang's output can't be read" in failed.error.message
    delivered = [event for event in bad if isinstance(event, Tokens)]
    assert failed.seq == sum(len(one.token_ids) for one in delivered) == garbled_at
    assert sum(isinstance(event, Failed | Finished) for event in bad) == 1
    assert len(served.aborted) == (0 if garbled_at == NUM_TOKENS - 1 else 1)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
