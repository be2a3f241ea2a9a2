"""Publishing, asking, serving, listening, and leaving in the right order."""

import asyncio

import nats
import pytest

from bus.connection import Bus
from bus.server import NatsServer
from bus.serving import Call
from schemas.errors import (
    AckTimeoutError,
    BusError,
    BusUnavailableError,
    CapacityError,
    EngineError,
    NoRespondersError,
    PayloadTooLargeError,
    RequestError,
)
from schemas.hop import Abort, AcceptedHop, Ack, Busy, Drain, Ok
from schemas.ids import AttemptId, Epoch
from schemas.message import Message, encode
from tests.conftest import BusFactory, frozen, wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

ABORT = Abort(attempt_id=AttemptId("a"), reason="test")


async def ok(message: Message, call: Call) -> Ok:
    return Ok()


async def test_a_served_subject_answers_from_its_first_moment(bus_factory: BusFactory) -> None:
    async with bus_factory() as server, bus_factory() as client:
        for number in range(100):  # nats-py's own subscribe and flush lose this race
            serving = await server.serve(f"t.race.{number}", Drain, ok)
            assert await client.ask(f"t.race.{number}", Drain(), Ok) == Ok()
            await serving.stop()


async def test_calls_that_race_a_stop_are_answered_or_refused_but_never_forgotten(bus_factory: BusFactory) -> None:
    """nats-py's drain forgets the subscription while the server still delivers to it."""
    outcomes: list[str] = []
    async with bus_factory() as server, bus_factory() as client:

        async def call(subject: str) -> None:
            try:
                await client.ask(subject, Drain(), Ok, timeout_s=5)
                outcomes.append("answered")
            except NoRespondersError:
                outcomes.append("refused")

        for number in range(20):
            serving = await server.serve(f"t.burst.{number}", Drain, ok)
            async with asyncio.TaskGroup() as calls:
                for _ in range(40):
                    calls.create_task(call(f"t.burst.{number}"))
                    await asyncio.sleep(0)
                calls.create_task(serving.stop())
                for _ in range(40):
                    calls.create_task(call(f"t.burst.{number}"))
                    await asyncio.sleep(0)
            await serving.wait_idle()
    assert len(outcomes) == 1600
    assert "answered" in outcomes


async def test_an_answer_may_be_one_of_several(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:

        async def handler(message: Drain | Abort, call: Call) -> Message:
            return Busy(by="w", reason="full") if isinstance(message, Drain) else AcceptedHop(by="w", epoch=Epoch(1))

        await bus.serve("t.union", Drain | Abort, handler)
        assert isinstance(await bus.ask("t.union", Drain(), AcceptedHop | Busy), Busy)
        assert isinstance(await bus.ask("t.union", ABORT, Ack), AcceptedHop)
        with pytest.raises(BusError, match="malformed"):
            await bus.ask("t.union", ABORT, Ok)


async def test_a_handlers_error_is_raised_at_the_asker_as_itself(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:

        async def handler(message: Drain, call: Call) -> None:
            raise EngineError("no memory", phase="prefill")

        await bus.serve("t.error", Drain, handler)
        for answer in (Ok, Ack):
            with pytest.raises(EngineError, match="no memory") as caught:
                await bus.ask("t.error", Drain(), answer)
            assert caught.value.phase == "prefill"


async def test_an_unexpected_exception_is_an_error_answer_and_the_service_lives_on(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:

        async def handler(message: Drain, call: Call) -> Ok:
            if message.grace_s is None:
                raise ZeroDivisionError("secret detail")
            return Ok()

        await bus.serve("t.bug", Drain, handler)
        with pytest.raises(Exception, match=r"^internal error$"):
            await bus.ask("t.bug", Drain(), Ok)
        assert await bus.ask("t.bug", Drain(grace_s=1.0), Ok) == Ok()


async def test_a_message_that_cant_be_decoded_is_answered_with_the_reason(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        await bus.serve("t.typed", Drain, ok)
        with pytest.raises(RequestError, match="malformed"):
            await bus.ask("t.typed", b"{", Ok)
        with pytest.raises(RequestError, match="malformed"):
            await bus.ask("t.typed", ABORT, Ok)


async def test_raw_payloads_and_streamed_answers(bus_factory: BusFactory, nats_server: NatsServer) -> None:
    async with bus_factory() as bus:

        async def handler(payload: bytes, call: Call) -> bytes:
            await call.respond(payload + b"1")
            await call.respond(payload + b"2")
            return b""

        await bus.serve("t.raw", bytes, handler)
        bare = await nats.connect(nats_server.internal_url)
        answers = await bare.subscribe("_INBOX.bare.x")
        await bare.publish("t.raw", b"chunk", reply="_INBOX.bare.x")
        assert [(await answers.next_msg(timeout=2)).data for _ in range(3)] == [b"chunk1", b"chunk2", b""]
        await bare.close()


async def test_nobody_listening_is_known_at_once(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        started = asyncio.get_running_loop().time()
        with pytest.raises(NoRespondersError):
            await bus.ask("t.nobody", Drain(), Ok, timeout_s=5.0)
        assert asyncio.get_running_loop().time() - started < 0.5


async def test_whoever_is_silent_isnt_blamed_for_a_server_that_stands_still(bus_factory: BusFactory) -> None:
    async def silent(message: Abort, call: Call) -> None:
        pass

    async with NatsServer() as server, bus_factory(url=server.internal_url) as bus:
        await bus.serve("x.silent", Abort, silent)
        with pytest.raises(AckTimeoutError):
            await bus.ask("x.silent", ABORT, Ok, timeout_s=0.1)
        async with frozen(server.pid):
            with pytest.raises(BusUnavailableError, match="NATS itself"):
                await bus.ask("x.silent", ABORT, Ok, timeout_s=0.1)


async def test_a_queue_group_shares_its_calls_and_a_stopped_member_gets_none(bus_factory: BusFactory) -> None:
    async with bus_factory() as one, bus_factory() as other, bus_factory() as client:
        counts = {"one": 0, "other": 0}

        def member(name: str):  # type: ignore[no-untyped-def]
            async def handler(message: Drain, call: Call) -> Ok:
                counts[name] += 1
                return Ok()

            return handler

        serving = await one.serve("t.queue", Drain, member("one"), queue="q")
        await other.serve("t.queue", Drain, member("other"), queue="q")
        for _ in range(100):
            await client.ask("t.queue", Drain(), Ok)
        assert min(counts.values()) > 10
        await serving.stop()
        before = counts["one"]
        for _ in range(20):
            await client.ask("t.queue", Drain(), Ok)
        assert counts["one"] == before


async def test_calls_beyond_the_limit_are_refused_at_once(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        release = asyncio.Event()

        async def handler(message: Drain, call: Call) -> Ok:
            await release.wait()
            return Ok()

        serving = await bus.serve("t.full", Drain, handler, max_concurrent_calls=1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(bus.ask("t.full", Drain(), Ok, timeout_s=5.0))
            await wait_until(lambda: len(serving.running) == 1)
            with pytest.raises(CapacityError) as caught:
                await bus.ask("t.full", Drain(), Ok)
            release.set()
        assert caught.value.retry_after_s == 1.0
        assert first.result() == Ok()


async def test_leaving_lets_running_calls_answer(bus_factory: BusFactory) -> None:
    async with bus_factory() as client:
        has_begun = asyncio.Event()

        async def handler(message: Drain, call: Call) -> Ok:
            has_begun.set()
            await asyncio.sleep(0.05)
            return Ok()

        async with asyncio.TaskGroup() as tasks, bus_factory() as server:
            await server.serve("t.leaving", Drain, handler)
            asked = tasks.create_task(client.ask("t.leaving", Drain(), Ok, timeout_s=5.0))
            await has_begun.wait()
        assert asked.result() == Ok()


async def test_the_blocks_own_exception_comes_out_as_it_is(bus_factory: BusFactory) -> None:
    with pytest.raises(KeyError):
        async with bus_factory():
            raise KeyError("x")


async def test_a_spawned_tasks_exception_is_not_fatal_and_leaving_cancels_it(bus_factory: BusFactory) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def wait() -> None:
        await asyncio.Event().wait()

    async with bus_factory() as bus:
        bus.spawn(fail(), "fail")
        waiting = bus.spawn(wait(), "wait")
        await bus.serve("t.alive", Drain, ok)
        assert await bus.ask("t.alive", Drain(), Ok) == Ok()
    assert waiting.cancelled()


async def test_a_wrong_login_fails_at_once_and_a_dead_address_within_the_timeout(nats_server: NatsServer) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(BusUnavailableError, match=r"(?i)authorization"):
        async with Bus.connect(f"nats://internal:wrong@127.0.0.1:{nats_server.port}", name="x", client_id="x"):
            pytest.fail("let in")
    assert loop.time() - started < 2.0
    with pytest.raises(BusUnavailableError, match=r"within 0\.3 s"):
        async with Bus.connect("nats://127.0.0.1:1", name="x", client_id="x", timeout_s=0.3):
            pytest.fail("connected to nothing")


async def test_a_server_that_takes_connections_and_says_nothing_is_said_to() -> None:
    async with NatsServer() as server, frozen(server.pid):
        with pytest.raises(BusUnavailableError, match="says nothing"):
            async with Bus.connect(server.internal_url, name="x", client_id="x", timeout_s=0.3):
                pytest.fail("let in")


async def test_too_large_a_message_is_a_typed_error_with_both_numbers(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        limit = bus.max_payload_bytes
        payload = bytes(limit + 1)
        for send in (bus.publish("t.large", payload), bus.ask("t.large", payload, Ok)):
            with pytest.raises(PayloadTooLargeError, match=rf"{limit + 1} bytes.* {limit} bytes"):
                await send
        await bus.publish("t.large", bytes(limit))
        assert bus.is_connected


async def test_too_large_an_answer_is_a_typed_error_at_the_asker(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:

        async def handler(payload: bytes, call: Call) -> bytes:
            return bytes(bus.max_payload_bytes + 1)

        await bus.serve("t.large_answer", bytes, handler)
        with pytest.raises(PayloadTooLargeError):
            await bus.ask("t.large_answer", b"", Ok)


@pytest.mark.parametrize("subject", ["a.*", "a.>", "a..b", "a b", ""])
async def test_publishing_to_wildcards_is_refused(bus_factory: BusFactory, subject: str) -> None:
    async with bus_factory() as bus:
        with pytest.raises(BusError):
            await bus.publish(subject, b"")


async def test_the_client_user_can_connect_too(bus_factory: BusFactory, nats_server: NatsServer) -> None:
    async with bus_factory() as server, bus_factory(url=nats_server.client_url, is_internal=False) as client:
        await server.serve(server.subjects.requests("m"), Drain, ok)
        started = asyncio.get_running_loop().time()
        await client.listen(f"{client.inbox}.tok.>", lambda subject, payload: None)
        assert asyncio.get_running_loop().time() - started < 0.5
        assert await client.ask(client.subjects.requests("m"), Drain(), Ok) == Ok()


async def test_the_micro_protocol_shows_the_service_and_counts_its_calls(
    bus_factory: BusFactory, nats_server: NatsServer
) -> None:
    async with bus_factory("w.1") as bus:
        await bus.serve(bus.subjects.worker("w1", "prefill"), Drain, ok)
        await bus.announce("worker", "0.1.0", {"role": "prefill"})
        await bus.ask(bus.subjects.worker("w1", "prefill"), Drain(), Ok)
        bare = await nats.connect(nats_server.internal_url)
        ping = (await bare.request("$SRV.PING.busway-worker", b"")).data
        info = (await bare.request("$SRV.INFO", b"")).data
        stats = (await bare.request("$SRV.STATS.busway-worker.w_2E1", b"")).data
        await bare.close()
        assert b'"type":"io.nats.micro.v1.ping_response","name":"busway-worker","id":"w_2E1"' in ping
        assert b'"metadata":{"role":"prefill"}' in ping
        assert b'"subject":"busway.v1.worker.w1.prefill"' in info
        assert b'"num_requests":1,"num_errors":0' in stats
        with pytest.raises(ValueError, match="semantic"):
            await bus.announce("worker", "dev")


async def test_encoded_messages_and_bytes_travel_alike(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus:
        await bus.serve("t.bytes", Drain, ok)
        assert await bus.ask("t.bytes", encode(Drain()), bytes) == encode(Ok())
