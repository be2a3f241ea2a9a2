"""Frames that never arrive: the holder is asked for them, and nobody else is troubled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from bus.client import Client
from bus.connection import Bus
from bus.server import NatsServer
from schemas.frames import Accepted, Decoding, Finished, Frame, Prefilling, Tokens, decode_frames
from schemas.hop import AcceptedHop
from schemas.request import GenerateRequest, StopConditions
from services.config import HandoffMode
from tests.conftest import wait_until
from tests.flow.stack import Stack, a_request, connect, stack

STEADY = {"decode_ms_per_step": "3"}
PROMPT = list(range(5, 45))
HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]


class Colander(Client):
    """A client behind a wire that loses the messages it is told to."""

    def __init__(self, bus: Bus, here: Stack, loses: Callable[[list[Frame]], bool]) -> None:
        super().__init__(bus, on_resubmit=here.resubmits.append, on_resend=here.resends.append)
        self._loses = loses
        self.num_lost = 0

    def _on_frames(self, subject: str, payload: bytes) -> None:
        if self._loses(decode_frames(payload)):
            self.num_lost += 1
        else:
            super()._on_frames(subject, payload)


@contextlib.asynccontextmanager
async def losing(here: Stack, loses: Callable[[list[Frame]], bool]) -> AsyncIterator[Colander]:
    """Give the stack a client (and a connection: frames of others' attempts are strays) that loses messages."""
    async with connect(here.server, "colander", here.namespace) as bus:
        here.client = colander = Colander(bus, here, loses)
        await colander.start()
        yield colander


def once(wanted: Callable[[Frame], bool]) -> Callable[[list[Frame]], bool]:
    """Lose the first message that carries such a frame."""
    left = [wanted]

    def loses(frames: list[Frame]) -> bool:
        if left and any(left[0](frame) for frame in frames):
            left.clear()
            return True
        return False

    return loses


@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize(
    "lost",
    [
        lambda frame: isinstance(frame, Tokens) and frame.seq == 0,
        lambda frame: isinstance(frame, Tokens) and frame.seq == 17,
        lambda frame: isinstance(frame, Decoding),
        lambda frame: isinstance(frame, Finished),
    ],
    ids=["first token", "a token", "decoding", "finished"],
)
async def test_a_lost_message_costs_one_resend_and_no_resubmit(
    server: NatsServer, handoff: HandoffMode, lost: Callable[[Frame], bool]
) -> None:
    async with stack(server, "p1", "d1", handoff=handoff, engine_args=STEADY) as here:
        expected = await here.generate(PROMPT, 40)
        async with losing(here, once(lost)) as colander:
            outcome = await here.generate(PROMPT, 40)
        assert outcome.ids == expected.ids
        assert msgspec.structs.replace(outcome.finished.usage, cached_tokens=0) == msgspec.structs.replace(
            expected.finished.usage, cached_tokens=0
        )
        assert colander.num_lost == 1
        assert len(here.resends) <= 2  # the router, where decode wasn't known
        assert here.resubmits == []
        await here.all_free()


async def test_every_hundredth_message_lost_loses_nothing(server: NatsServer) -> None:
    numbers = iter(range(1, 1_000_000))
    async with stack(server, "p1", "d1", "d2", engine_args=STEADY) as here:
        expected = {number: (await here.generate([number, 7], 60, temperature=1.0)).ids for number in range(3, 8)}
        async with losing(here, lambda frames: next(numbers) % 97 == 0) as colander, asyncio.TaskGroup() as clients:
            tasks = [
                clients.create_task(here.generate([number, 7], 60, temperature=1.0)) for number in list(expected) * 4
            ]
        assert [task.result().ids for task in tasks] == list(expected.values()) * 4
        assert colander.num_lost > 0
        await here.all_free()


@pytest.mark.parametrize("workers", [("p1", "d1"), ("b1",)])
@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_completion_resumed_at_its_very_end_is_finished_at_once(
    server: NatsServer, workers: tuple[str, ...], handoff: HandoffMode
) -> None:
    async with stack(server, *workers, handoff=handoff) as here:
        ids = (await here.generate(PROMPT, 6)).ids
        for stop, reason in (
            (StopConditions(max_tokens=6), "length"),
            (StopConditions(max_tokens=60, stop_token_ids=(ids[-1],)), "stop"),
        ):
            finished = await resumed(here, a_request(here, PROMPT, resume=tuple(ids), stop=stop))
            assert (finished.seq, finished.reason) == (6, reason)
            assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT), 6)
        await here.all_free()


async def resumed(here: Stack, request: GenerateRequest) -> Finished:
    """Send a request by hand; return its end, which must be all that comes of tokens and ends."""
    frames: list[Frame] = []
    serving = await here.bus.listen(request.stream.subject, lambda _, payload: frames.extend(decode_frames(payload)))
    await here.bus.ask(here.bus.subjects.requests(request.model), request, AcceptedHop)
    await wait_until(lambda: any(isinstance(frame, Finished) for frame in frames), explain=lambda: f"heard {frames}")
    await serving.stop()
    (last,) = (frame for frame in frames if not isinstance(frame, Accepted | Prefilling | Decoding))
    assert isinstance(last, Finished)
    return last
