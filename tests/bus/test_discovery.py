"""Registration and Fleet over a real server: joining, leaving, dying, being succeeded, and outages."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import nats
import pytest

from bus.connection import Bus
from bus.discovery import Fleet, TakenOverError, register, watch
from bus.fleet_state import DEAD_AFTER_S
from bus.lease_store import RECORD_TTL_S, LeaseStore
from bus.patiently import patiently
from bus.record_watch import RecordWatch
from bus.server import NatsServer
from schemas.ids import Epoch, WorkerId
from schemas.message import encode
from schemas.worker import Heartbeat, Record, RuntimeConfig, ServiceRecord
from tests.bus.records import worker_record
from tests.conftest import BusFactory, frozen, wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

W1, W2 = WorkerId("w1"), WorkerId("w2")


def idle() -> tuple[int, bool]:
    return 0, False


def record_changes(fleet: Fleet) -> list[tuple[str, int]]:
    """Return a list that fills with (kind, epoch) of every change."""
    changes: list[tuple[str, int]] = []
    fleet.on_change(lambda kind, record: changes.append((kind, record.epoch)))
    return changes


@asynccontextmanager
async def registrant(url: str, worker_id: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a registered process; it is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bus.registrant", url, worker_id, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"registered\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_service_joins_and_leaves_within_milliseconds(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, bus_factory() as watcher, watch(watcher) as fleet:
        started = time.monotonic()
        async with register(bus, worker_record(), idle):
            await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
            assert time.monotonic() - started < 0.3
            leaving = time.monotonic()
        await fleet.wait_for(lambda fleet: not fleet.workers and not fleet.all_records, 2.0)
        assert time.monotonic() - leaving < 0.1


async def test_routers_and_gateways_are_in_the_fleet_too(bus_factory: BusFactory) -> None:
    router = ServiceRecord(service="router", id="r1", epoch=Epoch(1), state="ready")
    gateway = ServiceRecord(service="gateway", id="g1", epoch=Epoch(1), state="ready", url="http://127.0.0.1:1")
    async with bus_factory() as bus, watch(bus) as fleet, register(bus, router, idle), register(bus, gateway, idle):
        await fleet.wait_for(lambda fleet: bool(fleet.routers and fleet.gateways), 2.0)
        assert (fleet.routers, fleet.gateways) == ({"r1": router}, {"g1": gateway})
        assert fleet.workers == {}


async def test_a_fleet_watched_later_finds_everyone_and_tells_each_callback(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, register(bus, worker_record(), idle), watch(bus) as fleet:
        assert list(fleet.all_records.values()) == [worker_record()]
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        assert record_changes(fleet) == [("joined", 1)]
        heartbeat = fleet.heartbeat(W1)
        assert heartbeat is not None
        assert heartbeat.epoch == 1


async def test_an_update_is_a_change_and_a_role_change_moves_the_record(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, watch(bus) as fleet, register(bus, worker_record(), idle) as registration:
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        changes = record_changes(fleet)
        await registration.update(worker_record(state="draining"))
        await fleet.wait_for(lambda fleet: fleet.workers[W1].state == "draining", 1.0)
        await registration.update(worker_record(role="decode"))
        await fleet.wait_for(lambda fleet: list(fleet.all_records) == ["m.decode.w1"], 1.0)
        assert fleet.workers[W1].role == "decode"
        assert changes == [("joined", 1), ("changed", 1), ("changed", 1)]


async def test_a_killed_process_is_noticed_in_about_two_seconds(
    bus_factory: BusFactory, nats_server: NatsServer
) -> None:
    async with bus_factory() as bus, watch(bus) as fleet, registrant(nats_server.internal_url, "w1") as process:
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        process.kill()
        killed = time.monotonic()
        await fleet.wait_for(lambda fleet: not fleet.workers, 5.0)
        assert 1.4 < time.monotonic() - killed < 3.0
        assert len(fleet.all_records) == 1  # until it expires; a record without a heartbeat isn't live


@pytest.mark.slow
async def test_a_frozen_process_is_out_and_back_in_when_it_wakes(
    bus_factory: BusFactory, nats_server: NatsServer
) -> None:
    async with bus_factory() as bus, watch(bus) as fleet, registrant(nats_server.internal_url, "w1") as process:
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        async with frozen(process.pid):
            await fleet.wait_for(lambda fleet: not fleet.workers, 5.0)
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)


async def test_a_server_outage_kills_nobody_and_the_watch_goes_on() -> None:
    """The bucket is in memory: the restarted server has neither it nor the watch's consumer."""
    async with (
        NatsServer() as server,
        Bus.connect(server.internal_url, name="w", client_id="w") as bus,
        Bus.connect(server.internal_url, name="f", client_id="f") as watcher,
        watch(watcher) as fleet,
        register(bus, worker_record(), idle) as registration,
    ):
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        changes = record_changes(fleet)
        server.kill()
        down_at = time.monotonic()
        await wait_until(lambda: time.monotonic() - down_at > DEAD_AFTER_S + 0.5)
        await server.start()
        await wait_until(lambda: bus.is_connected and watcher.is_connected)
        async with register(bus, worker_record("w2"), idle):
            await fleet.wait_for(lambda fleet: W2 in fleet.workers, 3.0)
        await registration.update(worker_record(state="draining"))
        await fleet.wait_for(lambda fleet: fleet.workers[W1].state == "draining", 2.0)
        store = LeaseStore(bus.jetstream(), bus.subjects.runtime_bucket)
        assert (await store.read("m.prefill.w1")).record == worker_record(state="draining")
        assert changes == [("joined", 1), ("joined", 1), ("left", 1), ("changed", 1)]  # w1 w2 w2 w1


async def test_a_frozen_server_kills_nobody() -> None:
    async with (
        NatsServer() as server,
        Bus.connect(server.internal_url, name="f", client_id="f") as bus,
        watch(bus) as fleet,
        registrant(server.internal_url, "w1"),
    ):
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        changes = record_changes(fleet)
        async with frozen(server.pid):
            since = time.monotonic()
            await wait_until(lambda: time.monotonic() - since > DEAD_AFTER_S + 1.0)
        async with register(bus, worker_record("w2"), idle):
            await fleet.wait_for(lambda fleet: W2 in fleet.workers, 3.0)
        assert changes[:2] == [("joined", 1), ("joined", 1)]
        assert W1 in fleet.workers


async def test_a_watcher_that_was_stopped_itself_kills_nobody_when_it_wakes(
    bus_factory: BusFactory, nats_server: NatsServer
) -> None:
    async with bus_factory() as bus, watch(bus) as fleet, registrant(nats_server.internal_url, "w1"):
        await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
        changes = record_changes(fleet)
        time.sleep(DEAD_AFTER_S + 0.5)  # noqa: ASYNC251 (what SIGSTOP would do to this very process)
        async with register(bus, worker_record("w2"), idle):
            await fleet.wait_for(lambda fleet: W2 in fleet.workers, 3.0)
        assert changes[:2] == [("joined", 1), ("joined", 1)]
        assert W1 in fleet.workers


async def test_a_higher_epoch_takes_the_id_over_and_the_old_process_must_go(bus_factory: BusFactory) -> None:
    async with bus_factory() as old_bus, bus_factory() as new_bus, watch(new_bus) as fleet:
        has_registered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            old = tasks.create_task(_until_taken_over(old_bus, has_registered))
            await has_registered.wait()
            await fleet.wait_for(lambda fleet: W1 in fleet.workers, 2.0)
            changes = record_changes(fleet)
            async with register(new_bus, worker_record(epoch=2), idle):
                assert await old  # at the latest with its next heartbeat, not at the renewal
                await fleet.wait_for(lambda fleet: W1 in fleet.workers and fleet.workers[W1].epoch == 2, 2.0)
                assert changes == [("joined", 1), ("left", 1), ("joined", 2)]
                await new_bus.settle()
                assert list(fleet.all_records.values()) == [worker_record(epoch=2)]


async def _until_taken_over(bus: Bus, has_registered: asyncio.Event) -> bool:
    with pytest.raises(TakenOverError):
        await _register_for_ever(bus, has_registered)
    return True


async def _register_for_ever(bus: Bus, has_registered: asyncio.Event) -> None:
    async with register(bus, worker_record(), idle):
        has_registered.set()
        await asyncio.Event().wait()


async def test_a_successor_under_another_key_is_a_takeover_too(bus_factory: BusFactory) -> None:
    async with bus_factory() as old_bus, bus_factory() as new_bus, asyncio.TaskGroup() as tasks:
        has_registered = asyncio.Event()
        old = tasks.create_task(_until_taken_over(old_bus, has_registered))
        await has_registered.wait()
        async with register(new_bus, worker_record(epoch=2, role="decode"), idle):
            assert await old


async def test_a_lower_epoch_may_not_register(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, bus_factory() as late, register(bus, worker_record(epoch=2), idle):
        with pytest.raises(TakenOverError, match="epoch 2"):
            async with register(late, worker_record(epoch=1), idle):
                pytest.fail("registered over its successor")
        store = LeaseStore(bus.jetstream(), bus.subjects.runtime_bucket)
        assert (await store.read("m.prefill.w1")).record == worker_record(epoch=2)


async def test_a_dead_predecessors_record_is_taken_over_at_once(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, watch(bus) as fleet:
        store = LeaseStore(bus.jetstream(), bus.subjects.runtime_bucket)
        marker = await store.read("m.prefill.w1")  # of the tests before
        await store.write("m.prefill.w1", encode(worker_record(epoch=1)), marker.revision)
        async with register(bus, worker_record(epoch=2), idle):
            await fleet.wait_for(lambda fleet: W1 in fleet.workers and fleet.workers[W1].epoch == 2, 1.0)


class Noted:
    """A RecordSink that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def put(self, key: str, record: Record) -> None:
        self.told.append(("put", key))

    def delete(self, key: str) -> None:
        self.told.append(("delete", key))

    def expire(self, key: str) -> None:
        self.told.append(("expire", key))

    def snapshot(self, keys: set[str]) -> None:
        self.told.append(("snapshot", ",".join(sorted(keys))))


async def test_expiry_is_visible_and_the_marker_doesnt_bar_a_new_registration(bus_factory: BusFactory) -> None:
    async with bus_factory(namespace="expiry") as bus:
        store = LeaseStore(bus.jetstream(), bus.subjects.runtime_bucket)
        await store.ensure()
        await store.write("m.prefill.w1", encode(worker_record()), 0, ttl_s=1)
        sink = Noted()
        follower = RecordWatch(bus.jetstream(), store, sink)
        await follower.start()
        assert sink.told == [("put", "m.prefill.w1"), ("snapshot", "m.prefill.w1")]
        await wait_until(lambda: ("expire", "m.prefill.w1") in sink.told, 3.0)
        stored = await store.read("m.prefill.w1")
        assert stored.record is None
        assert stored.revision > 0
        async with register(bus, worker_record(epoch=2), idle):
            await wait_until(lambda: sink.told[-1] == ("put", "m.prefill.w1"))
        await wait_until(lambda: sink.told[-1] == ("delete", "m.prefill.w1"))
        await follower.stop()


async def test_a_heartbeat_without_a_record_and_garbage_records_are_nobody(
    bus_factory: BusFactory, nats_server: NatsServer
) -> None:
    async with bus_factory() as bus, watch(bus) as fleet:
        intruder = await nats.connect(nats_server.internal_url)
        await intruder.publish("$KV.busway_runtime.m.decode.evil", b"\xff garbage")
        await intruder.publish("busway.v1.hb.worker.ghost", encode(Heartbeat(id="ghost", epoch=Epoch(1))))
        await intruder.publish("busway.v1.hb.worker.bad", b"{")
        await intruder.close()
        async with register(bus, worker_record(), idle):
            await fleet.wait_for(lambda fleet: bool(fleet.workers), 2.0)
            assert list(fleet.workers) == [W1]
            assert list(fleet.all_records) == ["m.prefill.w1"]


async def test_waiting_for_what_doesnt_come_times_out(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, watch(bus) as fleet:
        with pytest.raises(TimeoutError):
            await fleet.wait_for(lambda fleet: bool(fleet.workers), 0.05)


async def test_a_callback_that_fails_doesnt_stop_the_others(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, watch(bus) as fleet:

        def fails(kind: str, record: Record) -> None:
            raise ZeroDivisionError

        fleet.on_change(fails)
        changes = record_changes(fleet)
        async with register(bus, worker_record(), idle):
            await wait_until(lambda: changes == [("joined", 1)])


async def test_who_joins_while_jetstream_is_away_waits_for_it() -> None:
    """As a cluster's is for seconds after it has lost a node."""
    async with NatsServer() as server, Bus.connect(server.internal_url, name="w", client_id="w") as bus:
        server.kill()
        tries: list[str] = []

        async def join() -> None:
            async with register(bus, worker_record(), idle):
                tries.append("joined")

        async def look(order: Callable[[], Awaitable[None]], **kwargs: float) -> None:
            async def noted() -> None:
                tries.append("try")
                await order()

            await patiently(noted, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bus.registration.patiently", look)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(join())
                await wait_until(lambda: len(tries) >= 2, 15.0)
                await server.start()
        assert tries[-1] == "joined"


async def test_a_heart_that_fails_ends_the_registration(bus_factory: BusFactory) -> None:
    def broken() -> tuple[int, bool]:
        raise ZeroDivisionError

    async with bus_factory() as bus:
        with pytest.raises(ZeroDivisionError):
            async with register(bus, worker_record(), broken):
                await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_record_is_renewed_beyond_its_time_to_live(bus_factory: BusFactory) -> None:
    async with bus_factory() as bus, watch(bus) as fleet, register(bus, worker_record(), idle):
        since = time.monotonic()
        changes = record_changes(fleet)
        await wait_until(lambda: time.monotonic() - since > RECORD_TTL_S + 2, RECORD_TTL_S + 5)
        assert changes == [("joined", 1)]
        assert isinstance(fleet.all_records["m.prefill.w1"], RuntimeConfig)


async def test_a_watch_begun_anew_takes_its_old_consumer_back_from_the_server(bus_factory: BusFactory) -> None:
    """The server would keep it for ten seconds; a cluster that has lost a leader keeps some for good."""
    async with bus_factory() as probe, bus_factory() as bus, watch(bus):
        stream = f"KV_{bus.subjects.runtime_bucket}"

        async def consumers() -> set[str]:
            infos = await probe.jetstream().consumers_info(stream)
            return {info.name for info in infos if (info.config.deliver_subject or "").startswith(bus.inbox)}

        (old,) = await consumers()
        await bus._nats._process_op_err(ConnectionResetError("as if a proxy hung up"))
        async with asyncio.timeout(5.0):
            while old in (found := await consumers()) or len(found) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
