"""A session's home: the same for every router, another one for another salt, and for the others unmoved when a worker
leaves; the policy goes there as long as it costs little."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import WorkerId
from schemas.request import GenerateRequest
from services.router.candidates import Candidate
from services.router.kv_desk import KvDesk
from services.router.kv_policy import KvSettings
from services.router.kv_routing import KvMemory
from services.router.loads import WorkerLoad
from services.router.sessions import home_of
from tests.router.conftest import MakeConfig, a_config, a_request

IDLE = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=False)


def in_session(session: str, salt: str = "", num_tokens: int = 40) -> GenerateRequest:
    return msgspec.structs.replace(a_request(num_tokens), session=session, cache_salt=salt)


def candidates(make_config: MakeConfig, num: int, **loads: WorkerLoad) -> list[Candidate]:
    names = [f"w{n}" for n in range(num)]
    return [Candidate(config=make_config(name, "prefill"), load=loads.get(name, IDLE)) for name in names]


def a_desk(seed: int) -> KvDesk:
    return KvDesk(KvSettings(session_slack_s=0.05), KvMemory(), random.Random(seed))


def test_all_routers_send_a_session_to_the_same_worker(make_config: MakeConfig) -> None:
    fleet = candidates(make_config, 5)
    for session in ("alice", "bob", "carol"):
        homes = {a_desk(seed).choose_prompt(in_session(session), fleet, 1.0).worker for seed in range(8)}
        assert homes == {home_of(in_session(session), fleet)}
    decision = a_desk(1).choose_prompt(in_session("alice"), fleet, 1.0)
    assert decision.choice.why == "session"


def test_a_session_leaves_a_home_that_costs_too_much(make_config: MakeConfig) -> None:
    home = home_of(in_session("alice"), candidates(make_config, 5))
    assert home is not None
    busy = WorkerLoad(requests=9, queued_tokens=100_000, kv_used=0.5, is_suspect=False)
    fleet = candidates(make_config, 5, **{home: busy})
    assert a_desk(1).choose_prompt(in_session("alice"), fleet, 1.0).worker != home


def test_another_salt_has_no_hit_and_homes_of_its_own(make_config: MakeConfig) -> None:
    fleet = candidates(make_config, 8)
    sessions = [f"s{n}" for n in range(200)]
    moved = sum(home_of(in_session(one), fleet) != home_of(in_session(one, "tenant"), fleet) for one in sessions)
    assert moved > 140  # 7 of 8 by chance: the salt decides as much as the name
    assert home_of(in_session("ab", "x"), fleet) is not None
    desk = a_desk(1)
    decision = desk.choose_prompt(in_session("", num_tokens=64), fleet, 1.0)
    config = next(one.config for one in fleet if one.config.worker_id == decision.worker)
    desk.sent(in_session("", num_tokens=64), 1, decision, config, 1.0)
    again = msgspec.structs.replace(in_session("", num_tokens=64), attempt_id="b" * 22)
    assert desk.choose_prompt(again, fleet, 1.0).bid.cached_tokens > 0
    other = msgspec.structs.replace(again, attempt_id="c" * 22, cache_salt="tenant")
    assert desk.choose_prompt(other, fleet, 1.0).choice.best_overlap_tokens == 0


def test_a_request_without_a_session_has_no_home(make_config: MakeConfig) -> None:
    assert home_of(in_session(""), candidates(make_config, 3)) is None


@given(st.text(max_size=20), st.text(max_size=20), st.integers(2, 9), st.data())
def test_only_the_sessions_of_a_worker_that_leaves_move(session: str, salt: str, num: int, data: st.DataObject) -> None:
    fleet = [Candidate(config=a_config(f"w{n}", "prefill"), load=IDLE) for n in range(num)]
    request = in_session(session or "s", salt)
    home = home_of(request, fleet)
    leaves = data.draw(st.sampled_from([one.config.worker_id for one in fleet]))
    rest = [one for one in fleet if one.config.worker_id != leaves]
    assert (home_of(request, rest) == home) == (leaves != home)
    assert isinstance(home, str)
    assert WorkerId(home) in {one.config.worker_id for one in fleet}
