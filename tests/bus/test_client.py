"""The client library against a router and a worker made of bare bus calls: every way a request can end."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from bus.client import Client
from bus.connection import Bus
from bus.patience import Patience
from bus.server import NatsServer
from bus.serving import Call
from bus.subjects import is_under_inbox
from schemas.errors import (
    AckTimeoutError,
    BuswayError,
    CapacityError,
    DeadlineError,
    KvMismatchError,
    NoRespondersError,
    RequestError,
    StreamBrokenError,
    WorkerLostError,
)
from schemas.frames import (
    Accepted,
    Decoding,
    Failed,
    Finished,
    Frame,
    Prefilling,
    Tokens,
    Usage,
    encode_frames,
)
from schemas.hop import Abort, AcceptedHop, Busy, Resend
from schemas.ids import AttemptId, Epoch, WorkerId, new_request_id
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions
from tests.conftest import BusFactory, frozen, wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

QUICK = Patience(suspect_silence_s=0.2)
ACCEPTED = AcceptedHop(by="r1", epoch=Epoch(1))
Script = Callable[["Backend", GenerateRequest, Call], Awaitable[None]]


class Backend:
    """Router r1 and workers p1, d1 in one: runs a script for each request and notes who was told to abort."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.script: Script = complete
        self.requests: list[GenerateRequest] = []
        self.aborts: list[tuple[str, AttemptId]] = []
        self.resends: list[tuple[str, int]] = []
        self.sent: dict[AttemptId, list[Frame]] = {}
        self.is_ignorant = False

    async def start(self) -> None:
        subjects = self.bus.subjects
        await self.bus.serve(subjects.requests("m"), GenerateRequest, self._take)
        for holder in (subjects.router("r1", "abort"), subjects.worker("p1", "abort"), subjects.worker("d1", "abort")):
            await self.bus.serve(holder, Abort, self._aborted)
        for holder in (subjects.router("r1", "resend"), subjects.worker("d1", "resend")):
            await self.bus.serve(holder, Resend, self._resend)

    async def send(self, request: GenerateRequest, *frames: Frame) -> None:
        self.lose(request, *frames)
        await self.bus.publish(request.stream.subject, encode_frames(list(frames)))

    def lose(self, request: GenerateRequest, *frames: Frame) -> None:
        """Send frames that never arrive."""
        self.sent.setdefault(request.attempt_id, []).extend(frames)

    async def _take(self, request: GenerateRequest, call: Call) -> None:
        assert is_under_inbox(request.stream.subject, call.reply)
        self.requests.append(request)
        await self.script(self, request, call)

    async def _resend(self, resend: Resend, call: Call) -> AcceptedHop:
        holder = call.subject.split(".")[3]
        self.resends.append((holder, resend.from_seq))
        if self.is_ignorant:
            raise StreamBrokenError("never heard of it")
        request = next(one for one in self.requests if one.attempt_id == resend.attempt_id)
        frames = [frame for frame in self.sent[resend.attempt_id] if isinstance(frame, Tokens | Finished)]
        again = [frame for frame in frames if frame.seq >= resend.from_seq]
        if holder == "d1":
            await self.bus.publish(request.stream.subject, encode_frames(list(again)))
        return AcceptedHop(by="d1", epoch=Epoch(1))

    async def _aborted(self, abort: Abort, call: Call) -> None:
        self.aborts.append((call.subject.split(".")[3], abort.attempt_id))


def tokens(request: GenerateRequest, seq: int, num: int = 1) -> Tokens:
    return Tokens(request.attempt_id, seq, tuple(range(seq, seq + num)))


def finished(request: GenerateRequest, seq: int) -> Finished:
    return Finished(request.attempt_id, seq, "length", Usage(prompt_tokens=3, completion_tokens=seq))


async def begin(backend: Backend, request: GenerateRequest, call: Call) -> None:
    """Accept and say who holds it."""
    await call.respond(ACCEPTED)
    attempt = request.attempt_id
    await backend.send(request, Accepted(attempt, "r1"))
    await backend.send(request, Prefilling(attempt, WorkerId("p1")))
    await backend.send(request, Decoding(attempt, WorkerId("d1")))


async def complete(backend: Backend, request: GenerateRequest, call: Call) -> None:
    await begin(backend, request, call)
    for seq in range(request.stop.max_tokens):
        await backend.send(request, tokens(request, seq))
    await backend.send(request, finished(request, request.stop.max_tokens))


@asynccontextmanager
async def scene(bus_factory: BusFactory, script: Script, **settings: Any) -> AsyncIterator[tuple[Client, Backend]]:
    async with bus_factory() as client_bus, bus_factory() as service_bus:
        client = Client(client_bus, **settings)
        await client.start()
        backend = Backend(service_bus)
        backend.script = script
        await backend.start()
        yield client, backend
        assert client.num_in_flight == 0


def generate(
    client: Client, *, model: str = "m", max_tokens: int = 3, **changes: Any
) -> AsyncGenerator[list[Frame], None]:
    return client.generate(
        model=model,
        token_ids=(1, 2, 3),
        sampling=Sampling(seed=1),
        stop=StopConditions(max_tokens=max_tokens),
        request_id=new_request_id(),
        **changes,
    )


async def collect(frames_of: AsyncGenerator[list[Frame], None]) -> list[Frame]:
    async with aclosing(frames_of) as batches:
        return [frame async for batch in batches for frame in batch]


async def ids_of(frames_of: AsyncGenerator[list[Frame], None]) -> list[int]:
    return [one for frame in await collect(frames_of) if isinstance(frame, Tokens) for one in frame.token_ids]


async def test_a_request_yields_its_lifecycle_its_tokens_and_one_end(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, complete) as (client, backend):
        frames = await collect(generate(client))
        kinds = [type(frame) for frame in frames]
        assert kinds == [Accepted, Prefilling, Decoding, Tokens, Tokens, Tokens, Finished]
        assert backend.aborts == []


async def test_frames_of_one_message_come_as_one_batch(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await call.respond(ACCEPTED)
        await backend.send(request, tokens(request, 0), tokens(request, 1, 2), finished(request, 3))

    async with scene(bus_factory, script) as (client, _), aclosing(generate(client)) as batches:
        assert [len(batch) async for batch in batches] == [3]


async def test_many_requests_share_one_subject_and_dont_mix(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, complete) as (client, backend), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ids_of(generate(client, max_tokens=number))) for number in range(1, 65)]
        for number, task in enumerate(running, 1):
            assert await task == list(range(number))
        assert len({request.stream.subject for request in backend.requests}) == 1
        assert len({request.attempt_id for request in backend.requests}) == 64


async def test_a_failed_frame_is_raised_as_the_error_it_carries_after_the_tokens(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        error = KvMismatchError("no memory", phase="decode").record()
        await backend.send(request, tokens(request, 0), Failed(request.attempt_id, 1, error))

    async with scene(bus_factory, script) as (client, backend):
        heard: list[Frame] = []
        with pytest.raises(KvMismatchError, match="no memory"):
            await _collect_into(heard, generate(client))
        assert isinstance(heard[-1], Tokens)
        assert backend.aborts == []


async def _collect_into(heard: list[Frame], frames_of: AsyncGenerator[list[Frame], None]) -> None:
    async with aclosing(frames_of) as batches:
        async for batch in batches:
            heard += batch


async def test_nobody_serving_the_model_is_no_responders(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, complete) as (client, _):
        with pytest.raises(NoRespondersError):
            await collect(generate(client, model="unknown"))


async def test_a_refused_request_raises_the_routers_error(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        raise RequestError("prompt too long", param="messages")

    async with scene(bus_factory, script) as (client, backend):
        with pytest.raises(RequestError, match="prompt too long") as caught:
            await collect(generate(client))
        assert caught.value.param == "messages"
        assert len(backend.requests) == 1


async def test_busy_routers_are_tried_again_then_it_is_a_capacity_error(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await call.respond(Busy(by="r1", reason="full", retry_after_s=2.5))

    async with scene(bus_factory, script) as (client, backend):
        with pytest.raises(CapacityError, match="full") as caught:
            await collect(generate(client))
        assert caught.value.retry_after_s == 2.5
        assert len({request.attempt_id for request in backend.requests}) == 3


async def test_a_missing_ack_is_tried_again_under_a_new_attempt_id(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        if len(backend.requests) == 2:
            await complete(backend, request, call)

    async with scene(bus_factory, script, ack_timeout_s=0.1) as (client, backend):
        assert await ids_of(generate(client)) == [0, 1, 2]
        assert len({request.attempt_id for request in backend.requests}) == 2


async def test_no_ack_at_all_is_an_ack_timeout(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        return

    async with scene(bus_factory, script, ack_timeout_s=0.05) as (client, backend):
        with pytest.raises(AckTimeoutError):
            await collect(generate(client))
        assert len(backend.requests) == 3


async def test_a_lost_ack_doesnt_matter_when_frames_arrive(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await backend.send(request, Accepted(request.attempt_id, "r1"))
        await wait_until(lambda: client_gave_up_waiting.is_set())
        await backend.send(request, tokens(request, 0), finished(request, 1))

    client_gave_up_waiting = asyncio.Event()
    async with scene(bus_factory, script, ack_timeout_s=0.1) as (client, backend):
        async with aclosing(generate(client)) as batches:
            first = await anext(batches)
            client_gave_up_waiting.set()
            rest = [frame async for batch in batches for frame in batch]
        assert [type(frame) for frame in first + rest] == [Accepted, Tokens, Finished]
        assert len(backend.requests) == 1


async def test_frames_of_a_closed_attempt_are_dropped_and_answered_by_one_abort(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        if len(backend.requests) == 1:
            return  # the sender gives this one up
        late = backend.requests[0]
        for _ in range(3):
            await backend.send(late, Accepted(late.attempt_id, "r1"), Decoding(late.attempt_id, WorkerId("d1")))
            await backend.send(late, tokens(late, 0))
        await complete(backend, request, call)

    async with scene(bus_factory, script, ack_timeout_s=0.1) as (client, backend):
        assert await ids_of(generate(client)) == [0, 1, 2]
        await wait_until(lambda: len(backend.aborts) >= 2)
        await backend.bus.settle()
        late = backend.requests[0].attempt_id
        assert sorted(backend.aborts) == [("d1", late), ("r1", late)]


async def test_closing_early_aborts_at_every_holder_at_once(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))

    async with scene(bus_factory, script) as (client, backend):
        async with aclosing(generate(client)) as batches:
            async for batch in batches:
                if isinstance(batch[-1], Tokens):
                    break
        started = time.monotonic()
        await wait_until(lambda: len(backend.aborts) == 3)
        assert time.monotonic() - started < 0.1
        attempt = backend.requests[0].attempt_id
        assert sorted(backend.aborts) == [("d1", attempt), ("p1", attempt), ("r1", attempt)]


async def test_closing_while_the_ack_is_awaited_aborts_as_soon_as_a_holder_speaks(bus_factory: BusFactory) -> None:
    release = asyncio.Event()

    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await release.wait()
        await begin(backend, request, call)

    async with scene(bus_factory, script) as (client, backend):
        task = backend.bus.spawn(_ignore_frames(generate(client)), "caller")
        await wait_until(lambda: len(backend.requests) == 1)
        task.cancel()
        await asyncio.wait({task})
        release.set()
        await wait_until(lambda: len(backend.aborts) == 3)


async def _ignore_frames(frames_of: AsyncGenerator[list[Frame], None]) -> None:
    await collect(frames_of)


@pytest.mark.parametrize(
    ("stage", "phase"), [("accepted", "queue"), ("prefilling", "prefill"), ("decoding", "transfer")]
)
async def test_a_passed_deadline_names_its_phase_and_aborts(bus_factory: BusFactory, stage: str, phase: str) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await call.respond(ACCEPTED)
        lifecycle = {
            "accepted": Accepted(request.attempt_id, "r1"),
            "prefilling": Prefilling(request.attempt_id, WorkerId("p1")),
            "decoding": Decoding(request.attempt_id, WorkerId("d1")),
        }
        for name, frame in lifecycle.items():
            await backend.send(request, frame)
            if name == stage:
                return

    async with scene(bus_factory, script) as (client, backend):
        with pytest.raises(DeadlineError) as caught:
            await collect(generate(client, deadlines=Deadlines(first_token=time.time() + 0.2)))
        assert caught.value.phase == phase
        await wait_until(lambda: len(backend.aborts) >= 1)


async def test_a_deadline_already_passed_sends_nothing(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, complete) as (client, backend):
        with pytest.raises(DeadlineError):
            await collect(generate(client, deadlines=Deadlines(total=time.time() - 1)))
        assert backend.requests == []


async def test_a_pause_between_tokens_beyond_the_limit_is_a_deadline_of_decode(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))

    async with scene(bus_factory, script) as (client, _):
        with pytest.raises(DeadlineError) as caught:
            await collect(generate(client, deadlines=Deadlines(inter_token_s=0.1)))
        assert caught.value.phase == "decode"


async def test_tokens_that_keep_coming_move_the_inter_token_deadline(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        for seq in range(8):
            await backend.send(request, tokens(request, seq))
            await asyncio.sleep(0.05)
        await backend.send(request, finished(request, 8))

    async with scene(bus_factory, script) as (client, _):
        assert len(await ids_of(generate(client, max_tokens=8, deadlines=Deadlines(inter_token_s=0.3)))) == 8


async def test_a_lost_frame_costs_a_resend_and_nothing_else(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))
        backend.lose(request, tokens(request, 1))
        await backend.send(request, tokens(request, 2))
        await backend.send(request, finished(request, 3))

    async with scene(bus_factory, script) as (client, backend):
        frames = await collect(generate(client))
        assert [one for frame in frames if isinstance(frame, Tokens) for one in frame.token_ids] == [0, 1, 2]
        assert isinstance(frames[-1], Finished)
        assert (backend.resends, len(backend.requests), backend.aborts) == ([("d1", 1)], 1, [])


async def test_a_lost_end_is_asked_for_after_silence(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0, 3))
        backend.lose(request, finished(request, 3))

    async with scene(bus_factory, script, patience=Patience(silence_s=0.1)) as (client, backend):
        assert await ids_of(generate(client)) == [0, 1, 2]
        assert (backend.resends, len(backend.requests)) == ([("d1", 3)], 1)


async def test_a_holder_that_knows_nothing_costs_a_resubmit_elsewhere_with_the_ids_so_far(
    bus_factory: BusFactory,
) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        if len(backend.requests) == 1:
            await backend.send(request, tokens(request, 0))
            await backend.send(request, tokens(request, 2))
        else:
            await backend.send(request, tokens(request, 1, 2), finished(request, 3))

    async with scene(bus_factory, script) as (client, backend):
        backend.is_ignorant = True
        frames = await collect(generate(client))
        assert [one for frame in frames if isinstance(frame, Tokens) for one in frame.token_ids] == [0, 1, 2]
        assert isinstance(frames[-1], Finished)
        assert frames[-1].usage == Usage(prompt_tokens=3, completion_tokens=3, num_resubmits=1, is_resumed=True)
        first, second = backend.requests
        assert (second.resume, second.avoid) == ((0,), ("d1",))
        await wait_until(lambda: len(backend.aborts) == 3)
        assert {attempt for _, attempt in backend.aborts} == {first.attempt_id}


async def test_a_holder_that_has_nothing_new_is_waited_for_and_asked_less_and_less(bus_factory: BusFactory) -> None:
    release = asyncio.Event()

    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))
        await release.wait()
        await backend.send(request, tokens(request, 1, 2), finished(request, 3))

    async with scene(bus_factory, script, patience=Patience(silence_s=0.05)) as (client, backend):
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(ids_of(generate(client)))
            await wait_until(lambda: len(backend.resends) == 4)
            release.set()
        assert caller.result() == [0, 1, 2]
        assert len(backend.requests) == 1


async def test_a_server_that_stands_still_costs_a_stream_nothing(bus_factory: BusFactory) -> None:
    goes_on = asyncio.Event()

    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))
        await goes_on.wait()
        await backend.send(request, tokens(request, 1), tokens(request, 2), finished(request, 3))

    lost: list[str] = []
    patience = Patience(silence_s=0.1, answer_s=0.2)
    async with (
        NatsServer() as server,
        scene(partial(bus_factory, url=server.internal_url), script, patience=patience, on_resubmit=lost.append) as (
            client,
            backend,
        ),
        aclosing(generate(client)) as batches,
    ):
        heard: list[Frame] = []
        async for batch in batches:
            heard += batch
            if batch[-1] == tokens(backend.requests[0], 0):
                async with frozen(server.pid):
                    await asyncio.sleep(2)
                goes_on.set()
    assert [frame.seq for frame in heard if isinstance(frame, Tokens | Finished)] == [0, 1, 2, 3]
    assert (lost, len(backend.requests)) == ([], 1)


async def test_silence_before_decode_asks_the_router_who_has_it(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await call.respond(ACCEPTED)
        backend.lose(request, Decoding(request.attempt_id, WorkerId("d1")), tokens(request, 0, 3), finished(request, 3))

    async with scene(bus_factory, script, patience=Patience(silence_s=0.1)) as (client, backend):
        assert await ids_of(generate(client)) == [0, 1, 2]
        assert backend.resends == [("r1", 0), ("d1", 0)]


async def test_a_slow_consumers_lost_tail_is_sent_again(bus_factory: BusFactory) -> None:
    """nats-py drops the newest messages, the terminal frame among them: no gap would ever show."""

    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        for seq in range(200):
            await backend.send(request, tokens(request, seq))
        await backend.send(request, finished(request, 200))

    async with scene(bus_factory, script, max_pending_messages=4, patience=QUICK) as (client, backend):
        assert await ids_of(generate(client, max_tokens=200)) == list(range(200))
        assert backend.resends
        assert len(backend.requests) == 1


async def test_the_loss_of_the_holder_is_survived_up_to_the_limit(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, len(request.resume)))

    async with scene(bus_factory, script) as (client, backend):
        heard: list[Frame] = []
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(_fails_into(heard, generate(client, max_tokens=100)))
            for number in range(1, 5):
                await wait_until(lambda: sum(isinstance(frame, Tokens) for frame in heard) == number)  # noqa: B023
                for gone in ("r1", "p1", "d1"):
                    client.holder_left(gone)
        assert isinstance(caller.result(), WorkerLostError)
        assert [request.resume for request in backend.requests] == [(), (0,), (0, 1), (0, 1, 2)]


async def _fails_into(heard: list[Frame], frames_of: AsyncGenerator[list[Frame], None]) -> BuswayError:
    with pytest.raises(BuswayError) as caught:
        await _collect_into(heard, frames_of)
    return caught.value


async def test_a_completion_that_lacks_only_its_end_needs_nobody(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0, 3))

    async with scene(bus_factory, script) as (client, backend):
        for changes, reason in (({}, "length"), ({"max_tokens": 9, "end_ids": {2}}, "stop")):
            async with aclosing(generate(client, **changes)) as batches:  # type: ignore[arg-type]
                frames: list[Frame] = []
                async for batch in batches:
                    frames += batch
                    if isinstance(batch[-1], Tokens):
                        client.holder_left("d1")
            assert isinstance(frames[-1], Finished)
            assert (frames[-1].reason, frames[-1].seq) == (reason, 3)
            assert frames[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)
        assert len(backend.requests) == 2


async def test_a_users_seed_is_never_continued_by_an_engine_that_cant(bus_factory: BusFactory) -> None:
    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        await backend.send(request, tokens(request, 0))

    async with scene(bus_factory, script) as (client, backend):
        seeded = client.generate(
            model="m",
            token_ids=(1, 2, 3),
            sampling=Sampling(seed=1, is_user_seeded=True),
            stop=StopConditions(max_tokens=9),
            request_id=new_request_id(),
        )
        heard: list[Frame] = []
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(_fails_into(heard, seeded))
            await wait_until(lambda: bool(heard) and isinstance(heard[-1], Tokens))
            client.holder_left("d1")
        assert isinstance(caller.result(), WorkerLostError)
        assert "seeded" in caller.result().message
        assert len(backend.requests) == 1


async def test_the_loss_of_others_ends_nothing(bus_factory: BusFactory) -> None:
    async with scene(bus_factory, complete) as (client, _):
        async with aclosing(generate(client, max_tokens=20)) as batches:
            frames: list[Frame] = []
            async for batch in batches:
                frames += batch
                for gone in ("r1", "p1", "other"):
                    client.holder_left(gone)
        assert isinstance(frames[-1], Finished)


async def test_the_frame_path_is_cheap(bus_factory: BusFactory) -> None:
    """A guard against a change of kind (headers, a subscription a request), not a benchmark."""

    async def script(backend: Backend, request: GenerateRequest, call: Call) -> None:
        await begin(backend, request, call)
        for seq in range(2000):
            await backend.send(request, tokens(request, seq))
        await backend.send(request, finished(request, 2000))

    async with scene(bus_factory, script) as (client, _):
        started = time.process_time()
        assert len(await ids_of(generate(client, max_tokens=2000))) == 2000
        assert (time.process_time() - started) / 2000 < 200e-6
