"""FleetState: who is live, by hand-made cases and against a naive model."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bus.fleet_state import DEAD_AFTER_S, STALLED_AFTER_S, Change, FleetState, Ident
from schemas.ids import Epoch
from schemas.worker import Heartbeat, RuntimeConfig
from tests.bus.records import worker_record

W1 = Ident("worker", "w1")
KEY = "m.prefill.w1"


def beat(epoch: int = 1, worker_id: str = "w1", **changes: Any) -> Heartbeat:
    return Heartbeat(id=worker_id, epoch=Epoch(epoch), **changes)


def joined(now: float = 0.0) -> FleetState:
    state = FleetState()
    state.line_up(now)
    state.put(KEY, worker_record(), now)
    assert kinds(state.beat("worker", beat(), now)) == ["joined"]
    return state


def kinds(changes: list[Change]) -> list[str]:
    return [change.kind for change in changes]


def test_neither_a_record_nor_a_heartbeat_alone_is_live() -> None:
    state = FleetState()
    assert state.put(KEY, worker_record(), 0.0) == []
    assert state.live == {}
    state = FleetState()
    assert state.beat("worker", beat(), 0.0) == []
    assert kinds(state.put(KEY, worker_record(), 0.1)) == ["joined"]


def test_all_are_live_once_every_record_has_its_beat() -> None:
    state = FleetState()
    assert state.is_all_live
    state.put(KEY, worker_record(), 0.0)
    assert not state.is_all_live
    state.beat("worker", beat(), 0.1)
    assert state.is_all_live


def test_silence_is_death_and_a_new_beat_is_life() -> None:
    state = joined()
    assert state.tick(DEAD_AFTER_S) == []
    assert kinds(state.tick(DEAD_AFTER_S + 0.01)) == ["left"]
    assert kinds(state.beat("worker", beat(), 3.0)) == ["joined"]


def test_nobody_is_judged_while_the_line_is_down_nor_for_a_while_after() -> None:
    state = joined()
    state.line_down()
    assert state.tick(100.0) == []
    state.line_up(100.0)
    assert state.tick(100.0 + DEAD_AFTER_S) == []
    assert kinds(state.tick(100.1 + DEAD_AFTER_S)) == ["left"]


def test_an_orderly_leave_counts_at_once_by_beat_or_by_record() -> None:
    assert kinds(joined().beat("worker", beat(is_leaving=True), 0.1)) == ["left"]
    assert kinds(joined().delete(KEY, 0.1)) == ["left"]


def test_a_changed_record_is_a_change_not_a_new_worker() -> None:
    state = joined()
    changes = state.put(KEY, worker_record(state="draining"), 0.1)
    assert kinds(changes) == ["changed"]
    assert state.put(KEY, worker_record(state="draining"), 0.2) == []


def test_a_higher_epoch_is_a_new_worker_and_the_old_ones_words_dont_count() -> None:
    state = joined()
    assert kinds(state.put(KEY, worker_record(epoch=2), 0.1)) == ["left"]
    assert kinds(state.beat("worker", beat(2), 0.2)) == ["joined"]
    assert state.beat("worker", beat(1), 0.3) == []
    assert state.beat("worker", beat(1, is_leaving=True), 0.3) == []
    assert state.put("m.decode.w1", worker_record(role="decode"), 0.4) == []
    assert state.live[W1].epoch == 2


def test_a_role_change_writes_before_it_deletes_and_nobody_leaves() -> None:
    state = joined()
    assert kinds(state.put("m.decode.w1", worker_record(role="decode"), 0.1)) == ["changed"]
    assert state.delete(KEY, 0.2) == []
    live = state.live[W1]
    assert isinstance(live, RuntimeConfig)
    assert live.role == "decode"


def test_a_lost_bucket_kills_nobody_who_beats() -> None:
    state = joined()
    assert state.snapshot(set(), 0.5) == []
    state.beat("worker", beat(), 1.0)
    assert state.tick(1.1) == []
    assert W1 in state.live
    assert kinds(state.tick(4.0)) == ["left"]
    assert state.records == {}


def test_an_expired_record_goes_with_its_beats() -> None:
    state = joined()
    assert state.expire(KEY, 1.0) == []
    assert kinds(state.tick(3.1)) == ["left"]
    assert state.records == {}
    silent = FleetState()
    silent.put(KEY, worker_record(), 0.0)
    silent.expire(KEY, 1.0)
    assert silent.records == {}


def test_a_record_missing_from_a_snapshot_yields_to_the_one_that_replaced_it() -> None:
    state = joined()
    state.line_down()  # the role change happened meanwhile
    state.line_up(5.0)
    state.put("m.decode.w1", worker_record(role="decode"), 5.0)
    state.snapshot({"m.decode.w1"}, 5.0)
    assert list(state.records) == ["m.decode.w1"]


def test_busy_without_progress_is_not_live_until_it_moves() -> None:
    state = joined()
    now = 0.0
    seen: list[str] = []
    while now < STALLED_AFTER_S + 2:
        now += 0.5
        seen += kinds(state.beat("worker", beat(progress=7, is_busy=True), now))
        seen += kinds(state.tick(now))
    assert seen == ["left"]
    assert kinds(state.beat("worker", beat(progress=8, is_busy=True), now)) == ["joined"]


def test_idle_without_progress_is_live() -> None:
    state = joined()
    now = 0.0
    while now < STALLED_AFTER_S + 5:
        now += 0.5
        state.beat("worker", beat(progress=7), now)
        assert state.tick(now) == []


def test_workers_and_routers_of_one_id_are_two_services() -> None:
    state = joined()
    assert state.beat("router", beat(is_leaving=True), 0.1) == []
    assert W1 in state.live


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 3), st.sampled_from(["prefill", "decode"])),
            st.tuples(st.just("delete"), st.just(0), st.sampled_from(["prefill", "decode"])),
            st.tuples(st.just("beat"), st.integers(1, 3), st.booleans()),
            st.tuples(st.just("tick"), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    st.data(),
)
def test_live_is_what_a_naive_model_says_and_changes_add_up(events: list[Any], data: st.DataObject) -> None:
    state = FleetState()
    now = 0.0
    records: dict[str, tuple[int, int]] = {}  # key -> epoch, order
    last: tuple[int, bool, float] | None = None  # epoch, is_leaving, seen at
    present: list[Change] = []
    for order, (kind, epoch, what) in enumerate(events):
        now += data.draw(st.sampled_from([0.0, 0.3, 1.5]))
        changes: list[Change] = []
        if kind == "put":
            key = f"m.{what}.w1"
            records[key] = (epoch, order)
            changes = state.put(key, worker_record(epoch=epoch, role=what), now)
        elif kind == "delete":
            records.pop(f"m.{what}.w1", None)
            changes = state.delete(f"m.{what}.w1", now)
        elif kind == "beat" and (last is None or epoch >= last[0]):
            last = (epoch, what, now)
        if kind == "beat":
            changes = state.beat("worker", beat(epoch, is_leaving=what), now)
        changes += state.tick(now)
        best = max(records.items(), key=lambda item: item[1], default=None)
        is_live = (
            best is not None
            and last is not None
            and last[0] == best[1][0]
            and not last[1]
            and now - last[2] <= DEAD_AFTER_S
        )
        for change in changes:
            present = [] if change.kind == "left" else [change]
        assert (W1 in state.live) == is_live
        assert [change.record for change in present] == list(state.live.values())
        if is_live and best is not None:
            assert state.live[W1].epoch == best[1][0]
