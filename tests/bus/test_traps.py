"""The traps of NATS and nats-py that this package exists to keep from everyone else, each staged for real."""

import asyncio
import threading
import time
from contextlib import AsyncExitStack

import nats
import pytest
import uvloop

from bus.connection import OUTBOUND_LIMIT_BYTES, Bus
from bus.deadlines import check_deadlines
from bus.server import MIB, NatsServer
from bus.serving import Call
from schemas.errors import AckTimeoutError, BusUnavailableError, BuswayError, DeadlineError
from schemas.hop import AcceptedHop, Busy, Drain, Ok
from schemas.ids import AttemptId, Epoch
from schemas.message import Message
from schemas.request import Deadlines, GenerateRequest
from tests.bus.records import a_request
from tests.conftest import BusFactory, frozen, wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


async def ok(message: Message, call: Call) -> Ok:
    return Ok()


async def test_exceptions_and_cancelled_errors_in_a_listener_dont_end_its_subscription(
    bus_factory: BusFactory,
) -> None:
    heard: list[bytes] = []

    def callback(subject: str, payload: bytes) -> None:
        heard.append(payload)
        if payload == b"cancelled":
            raise asyncio.CancelledError
        if payload == b"bug":
            raise ZeroDivisionError

    async with bus_factory() as bus:
        serving = await bus.listen("t.listen", callback)
        for payload in (b"cancelled", b"bug", b"fine"):
            await bus.publish("t.listen", payload)
        await wait_until(lambda: b"fine" in heard)
        assert serving.num_errors == 2


async def test_a_cancelled_error_out_of_a_handler_is_an_answer_and_the_service_lives_on(
    bus_factory: BusFactory,
) -> None:
    async def handler(message: Drain, call: Call) -> Ok:
        if message.grace_s is None:
            raise asyncio.CancelledError
        return Ok()

    async with bus_factory() as bus:
        await bus.serve("t.cancelled", Drain, handler)
        with pytest.raises(BuswayError, match="internal error"):
            await bus.ask("t.cancelled", Drain(), Ok)
        assert await bus.ask("t.cancelled", Drain(grace_s=1.0), Ok) == Ok()


async def test_a_slow_call_doesnt_hold_up_the_next(bus_factory: BusFactory) -> None:
    release = asyncio.Event()

    async def handler(message: Drain, call: Call) -> Ok:
        if message.grace_s is None:
            await release.wait()
        return Ok()

    async with bus_factory() as bus, asyncio.TaskGroup() as tasks:
        await bus.serve("t.slow", Drain, handler)
        slow = tasks.create_task(bus.ask("t.slow", Drain(), Ok, timeout_s=5.0))
        await bus.ask("t.slow", Drain(grace_s=1.0), Ok)
        assert not slow.done()
        release.set()


async def test_a_slow_consumers_loss_is_noticed(bus_factory: BusFactory) -> None:
    drops: list[int] = []
    heard: list[bytes] = []
    async with bus_factory() as bus, bus_factory() as sender:
        await bus.listen(
            "t.flood",
            lambda subject, payload: heard.append(payload),
            on_drop=drops.append,
            max_pending_messages=8,
        )
        for _ in range(100):
            await sender.publish("t.flood", b"x")
        await wait_until(lambda: len(heard) + len(drops) == 100)
        assert set(drops) == {8}
        assert bus.num_dropped == len(drops)


async def test_headers_of_a_request_are_not_echoed(bus_factory: BusFactory, nats_server: NatsServer) -> None:
    async with bus_factory() as bus:
        await bus.serve("t.headers", Drain, ok)
        bare = await nats.connect(nats_server.internal_url)
        answer = await bare.request("t.headers", b'{"type":"drain.v1"}', headers={"Authorization": "Bearer secret"})
        await bare.close()
        assert not answer.headers


@pytest.mark.parametrize("reply", ["$KV.busway_runtime.m.decode.w1", "busway.v1.admin.w1.drain", "t.elsewhere"])
async def test_a_call_cant_make_a_service_write_outside_inboxes(
    bus_factory: BusFactory, nats_server: NatsServer, reply: str
) -> None:
    heard: list[str] = []
    async with bus_factory() as bus:
        serving = await bus.serve(bus.subjects.requests("m"), bytes, ok)
        await bus.listen(reply, lambda subject, payload: heard.append(subject))
        attacker = await nats.connect(nats_server.client_url)
        await attacker.publish(bus.subjects.requests("m"), b"{}", reply=reply)
        with pytest.raises(nats.errors.NoRespondersError):
            await attacker.request("busway.v1.requests.nobody", b"")
        await attacker.close()
        await bus.settle()
        assert serving.num_calls == 0
        assert heard == []


async def test_what_is_published_while_disconnected_is_kept_within_bounds_and_arrives_after_the_restart() -> None:
    heard: list[bytes] = []
    async with NatsServer() as server, Bus.connect(server.internal_url, name="a", client_id="a") as bus:
        await bus.listen("t.buffered", lambda subject, payload: heard.append(payload))
        server.kill()
        await wait_until(lambda: not bus.is_connected)
        await bus.publish("t.buffered", b"kept")
        with pytest.raises(BusUnavailableError, match="no connection"):
            await bus.ask("t.buffered", Drain(), Ok, timeout_s=0.2)
        with pytest.raises(BusUnavailableError, match="buffer is full"):
            await _publish_repeatedly(bus, OUTBOUND_LIMIT_BYTES // MIB + 1)
        await server.start()
        await wait_until(lambda: heard == [b"kept"])


async def _publish_repeatedly(bus: Bus, num_mib: int) -> None:
    for _ in range(num_mib):
        await bus.publish("t.nowhere", bytes(MIB))


async def test_an_ask_waits_for_a_lost_connection_within_its_timeout() -> None:
    async with (
        NatsServer() as server,
        Bus.connect(server.internal_url, name="a", client_id="a") as bus,
        asyncio.TaskGroup() as tasks,
    ):
        await bus.serve("t.back", Drain, ok)
        reconnects: list[None] = []

        async def came_back() -> None:
            reconnects.append(None)

        bus.on_reconnect(came_back)
        await server.stop()
        await wait_until(lambda: not bus.is_connected)
        asked = tasks.create_task(bus.ask("t.back", Drain(), Ok, timeout_s=10.0))
        await server.start()
        assert await asked == Ok()
        await wait_until(lambda: reconnects == [None])


async def test_a_request_that_timed_out_and_arrives_after_all_is_dropped() -> None:
    """The server freezes for longer than the ask's second; then both the request and its repetition arrive."""
    seen: set[AttemptId] = set()
    outcomes: list[str] = []

    async def router(request: GenerateRequest, call: Call) -> AcceptedHop | Busy:
        try:
            check_deadlines(request.deadlines, "accepted", time.time())
        except DeadlineError:
            outcomes.append("late")
            raise
        if request.attempt_id in seen:
            outcomes.append("duplicate")
            return Busy(by="r", reason="duplicate")
        seen.add(request.attempt_id)
        outcomes.append("taken")
        return AcceptedHop(by="r", epoch=Epoch(1))

    async with (
        NatsServer() as server,
        Bus.connect(server.internal_url, name="a", client_id="a") as client,
        Bus.connect(server.internal_url, name="r", client_id="r") as service,
    ):
        await service.serve("t.late", GenerateRequest, router)
        impatient = a_request(AttemptId("late"), deadlines=Deadlines(queue=time.time() + 0.2))
        twice = a_request(AttemptId("twice"))
        async with frozen(server.pid):
            for request in (impatient, twice):
                with pytest.raises(BusUnavailableError):
                    await client.ask("t.late", request, AcceptedHop | Busy, timeout_s=0.2)
        await client.ask("t.late", twice, AcceptedHop | Busy)
        assert outcomes == ["late", "taken", "duplicate"]


async def test_a_server_killed_in_mid_request_costs_no_more_than_the_timeout() -> None:
    async with (
        NatsServer() as server,
        Bus.connect(server.internal_url, name="a", client_id="a") as bus,
    ):
        has_begun = asyncio.Event()

        async def handler(message: Drain, call: Call) -> None:
            has_begun.set()

        await bus.serve("t.mute", Drain, handler)
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_fails(bus))
            await has_begun.wait()
            server.kill()
        assert isinstance(asked.result(), BusUnavailableError | AckTimeoutError)
        assert time.monotonic() - started < 1.5


async def test_leaving_while_the_server_is_away_under_uvloop_is_no_error() -> None:
    """nats-py writes what it has kept to the closed transport; uvloop's raises RuntimeError then."""
    is_connected = threading.Event()

    async def live(url: str) -> None:
        async with Bus.connect(url, name="u", client_id="u") as bus:
            is_connected.set()
            await wait_until(lambda: not bus.is_connected)
            await bus.publish("t.kept", b"for later")

    async with NatsServer() as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(lambda: uvloop.run(live(server.internal_url))))
        await asyncio.to_thread(is_connected.wait, 5)
        server.kill()


async def _fails(bus: Bus) -> BuswayError:
    with pytest.raises(BuswayError) as caught:
        await bus.ask("t.mute", Drain(), Ok, timeout_s=1.0)
    return caught.value


async def test_a_connection_closed_for_good_ends_the_block(bus_factory: BusFactory) -> None:
    """Payload at the limit plus any header: nats-py lets it pass, the server hangs up and won't be reconnected to."""
    with pytest.raises(BusUnavailableError, match="closed for good"):
        await _live_on_after_too_large_a_message(bus_factory)


async def _live_on_after_too_large_a_message(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        with pytest.raises(nats.errors.Error):
            await bus.jetstream().publish("t.js", bytes(bus.max_payload_bytes), headers={"a": "b"})
        await asyncio.Event().wait()


async def test_cancelling_a_wait_for_the_server_leaves_the_connection_alive(bus_factory: BusFactory) -> None:
    """A cancelled nats-py flush kills the read loop when its PONG arrives."""
    async with bus_factory() as bus:
        await bus.serve("t.alive", Drain, ok)
        for _ in range(20):
            for coro in (bus.settle(), bus.listen("t.other", lambda subject, payload: None)):
                task = bus.spawn(_swallow_result(coro), "cancel me")
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
        for serving in list(bus.servings):
            if serving.subject == "t.other":
                task = bus.spawn(serving.stop(), "stop")
                await asyncio.sleep(0)
                task.cancel()
        assert await bus.ask("t.alive", Drain(), Ok) == Ok()


async def _swallow_result(coro) -> None:  # type: ignore[no-untyped-def]
    await coro


async def test_a_cancellation_is_not_swallowed_while_the_outbound_buffer_is_full() -> None:
    async with NatsServer() as server, Bus.connect(server.internal_url, name="a", client_id="a") as bus:

        async def publish_for_ever() -> None:
            while True:
                await bus.publish("t.flood", bytes(4 * MIB))

        async with frozen(server.pid):
            task = bus.spawn(publish_for_ever(), "flood")
            await asyncio.sleep(0.05)
            assert not task.done()
            task.cancel()
            await asyncio.wait({task}, timeout=2.0)
            assert task.cancelled()


async def test_leaving_is_bounded_while_the_server_is_frozen() -> None:
    async with NatsServer() as server, AsyncExitStack() as outlives:
        async with Bus.connect(server.internal_url, name="a", client_id="a") as bus:
            await bus.serve("t.x", Drain, ok)
            await outlives.enter_async_context(frozen(server.pid))
            started = time.monotonic()
        assert time.monotonic() - started < 7.0


async def test_leaving_is_quick_while_disconnected() -> None:
    async with NatsServer() as server:
        async with Bus.connect(server.internal_url, name="a", client_id="a") as bus:
            await bus.serve("t.x", Drain, ok)
            server.kill()
            await wait_until(lambda: not bus.is_connected)
            started = time.monotonic()
        assert time.monotonic() - started < 2.0
