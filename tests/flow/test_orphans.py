"""A client without a heartbeat that dies: nobody listens to its streams any more, and its requests are aborted."""

import asyncio

import pytest

from bus.server import NatsServer
from schemas.frames import Tokens, decode_frames
from schemas.hop import AcceptedHop
from schemas.request import StreamAddress
from services.worker import listeners
from tests.flow.stack import a_request, connect, stack


@pytest.mark.parametrize("workers", [("p1", "d1"), ("b1",)])
async def test_a_bare_client_that_dies_frees_its_workers(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(listeners, "PERIOD_S", 0.1)
    async with stack(server, *workers, engine_args={"decode_ms_per_step": "5"}) as here:
        started = asyncio.Event()

        def num_tokens() -> int:
            return sum(member.load().num_generated_tokens for member in here.members.values())

        def heard(subject: str, payload: bytes) -> None:
            if any(isinstance(frame, Tokens) for frame in decode_frames(payload)):
                started.set()

        async with connect(here.server, "bare", here.namespace) as bus:
            stream = StreamAddress(subject=f"{bus.inbox}.raw.s")
            await bus.listen(stream.subject, heard)
            await bus.ask(bus.subjects.requests("sim"), a_request(here, [5, 6, 7], 20_000, stream=stream), AcceptedHop)
            await started.wait()
            # Looked after many times over, it lives on.
            await here.until(lambda: num_tokens() > 150)
            assert sum(member.load().running for member in here.members.values()) == 1
        await here.all_free(3.0)
