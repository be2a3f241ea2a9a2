"""The desk's memory of prompts on their way: as good as cached where they go, until it is known what became of them."""

import random

import msgspec
import pytest

from schemas.ids import AttemptId, WorkerId
from schemas.request import GenerateRequest
from schemas.worker import LoadReport, PrefillCost, Role
from services.router.candidates import Candidate
from services.router.kv_desk import KvDesk
from services.router.kv_policy import KvSettings
from services.router.kv_routing import KvMemory
from services.router.loads import WorkerLoad
from services.router.local_prefill import LocalSettings
from tests.router.conftest import a_config, a_request

COST = PrefillCost(num_passes=99, base_s=0.01, token_s=1e-4)
IDLE = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=False, prefill_cost=COST)


def a_desk() -> KvDesk:
    return KvDesk(KvSettings(local=LocalSettings(is_on=True)), KvMemory(), random.Random(1))


def candidate(desk: KvDesk, name: str, role: Role) -> Candidate:
    config = msgspec.structs.replace(a_config(name, role), has_kv_events=True)
    desk.joined(config)
    return Candidate(config=config, load=IDLE)


def attempt(name: str) -> GenerateRequest:
    return msgspec.structs.replace(a_request(64), attempt_id=AttemptId(name))


def report(worker: WorkerId, **fields: object) -> LoadReport:
    values: dict[str, object] = {
        "epoch": 1,
        "running": 1,
        "waiting": 0,
        "kv_blocks_used": 0,
        "kv_blocks_cached": 0,
        "kv_blocks_total": 100,
    }
    return LoadReport(worker_id=worker, **(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["decode", "both"])
def test_a_prompt_that_is_decoded_where_it_is_computed_is_on_its_way_until_a_report_shows_it_done(role: Role) -> None:
    desk = a_desk()
    where = candidate(desk, "d", role)
    decision = desk.choose_prompt(attempt("x"), [where], 1.0)
    desk.sent(attempt("x"), 7, decision, where.config, 1.0)

    def cached() -> int:
        return desk.choose_prompt(attempt("y"), [where], 1.0).bid.cached_tokens

    assert cached() == 48
    desk.on_report(report(where.config.worker_id), 6)  # hasn't come there yet
    assert cached() == 48
    desk.on_report(report(where.config.worker_id, queued_prefill_tokens=64), 7)  # waits
    assert cached() == 48
    desk.on_report(report(where.config.worker_id), 7)
    assert cached() == 0  # what it cached is told by its events
    desk.over(AttemptId("x"))


def test_the_way_by_prefill_counts_the_transfer_that_decode_workers_have_measured() -> None:
    desk = a_desk()
    prefill, decode = candidate(desk, "p", "prefill"), candidate(desk, "d", "decode")
    remote = desk.choose_prompt(attempt("x"), [prefill], 1.0)
    plain = desk.estimate(attempt("x"), remote, "c1")
    desk.on_report(report(decode.config.worker_id, transfer_cost=PrefillCost(num_passes=3, base_s=0.5)))
    measured = desk.estimate(attempt("x"), remote, "c1")
    assert plain is not None
    assert measured is not None
    assert measured.ttft_s == pytest.approx(plain.ttft_s + 0.5)
    assert measured.prefill_s == plain.prefill_s == pytest.approx(remote.score)
    local = desk.stay_or_go(attempt("x"), remote, [decode], hides_transfer=False).choice.local
    hidden = desk.stay_or_go(attempt("x"), remote, [decode], hides_transfer=True).choice.local
    assert local is not None
    assert hidden is not None
    assert local.remote_s == pytest.approx(hidden.remote_s + 0.5)
    desk.left(decode.config.worker_id)
    assert desk.estimate(attempt("x"), remote, "c1") == plain
