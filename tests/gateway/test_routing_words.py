"""What a caller may say of its request's way, what it is told of it, and the routers' numbers at /metrics."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.serving import Call
from schemas.explanation import Choice, ExplainRequest, Explanation
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import encode
from schemas.router_report import ERROR_BUCKETS_S, RouterReport, RoutingTotals
from tests.gateway.conftest import MODEL, Rig, wait_for
from tests.gateway.peer import PREFILL, ROUTER, Attempt

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def explaining(rig: Rig) -> AsyncIterator[None]:
    """Answer as the router for the length of the block."""

    async def answer(request: ExplainRequest, call: Call) -> Explanation:
        choice = Choice(leg="prefill", worker=WorkerId(PREFILL), why="best estimate", num_candidates=1)
        return Explanation(router=ROUTER, policy="kv", attempt_id=AttemptId(request.id), choices=(choice,))

    serving = await rig.fleet_bus.serve(rig.fleet_bus.subjects.router(ROUTER, "explain"), ExplainRequest, answer)
    yield
    await serving.stop()


async def test_session_priority_and_first_token_limit_reach_the_router(rig: Rig) -> None:
    before = time.time()
    status, _ = await rig.chat(prompt_cache_key="alice", priority=-3, busway={"first_token_s": 5.0}, cache_salt="t")
    asked = rig.peer.last.request
    assert status == 200
    assert (asked["session"], asked["priority"], asked["cache_salt"]) == ("alice", 3, "t")
    assert before + 5.0 <= asked["deadlines"]["first_token"] <= time.time() + 5.0
    await rig.chat()
    asked = rig.peer.last.request
    assert "first_token" not in asked["deadlines"]
    assert not {"session", "priority"} & asked.keys()


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("prompt_cache_key", "x" * 257, "prompt_cache_key", "256"),
        ("prompt_cache_key", 3, "prompt_cache_key", "expected"),
        ("priority", "high", "priority", "expected"),
        ("priority", 2**31, "priority", "2147483647"),
        ("busway", {"first_token_s": 0}, "busway.first_token_s", "> 0"),
        ("busway", {"first_token_s": 1e9}, "busway.first_token_s", "86400"),
        ("busway", {"explian": True}, "busway", "explian"),
    ],
)
async def test_words_that_say_nothing_are_refused_naming_field_and_limit(
    rig: Rig, field: str, value: object, param: str, words: str
) -> None:
    status, answer = await rig.chat(**{field: value})
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


async def test_an_answer_tells_its_way_when_asked(rig: Rig) -> None:
    async with explaining(rig):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        _, answer = await rig.post("/v1/chat/completions", body, headers={"X-Busway-Explain": "1"})
        (way,) = answer["busway"]["routing"]
        assert (way["router"], way["attempt_id"]) == (ROUTER, rig.peer.last.id)
        assert way["choices"][0]["worker"] == PREFILL
        assert "first_token_s" not in answer["busway"]
        _, answer = await rig.chat(n=2, busway={"explain": True, "timings": True})
        assert {way["attempt_id"] for way in answer["busway"]["routing"]} == {
            attempt.id for attempt in rig.peer.attempts[-2:]
        }
        assert "first_token_s" in answer["busway"]
        assert "busway" not in (await rig.chat())[1]


async def test_a_stream_tells_its_way_in_its_last_chunk(rig: Rig) -> None:
    async with explaining(rig):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with rig.http.post(
            f"{rig.url}/v1/chat/completions", json=body, headers={"X-Busway-Explain": "1"}
        ) as response:
            lines = [line for line in (await response.text()).splitlines() if line.startswith("data: {")]
    told = [json.loads(line[6:]).get("busway") for line in lines]
    assert [one is not None for one in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["routing"][0]["attempt_id"] == rig.peer.last.id


async def test_an_answer_never_fails_for_want_of_its_explanation(rig: Rig) -> None:
    status, answer = await rig.chat(busway={"explain": True})
    assert status == 200
    assert "error" in answer["busway"]["routing"][0]


async def test_a_request_refused_by_estimate_is_429_with_retry_after(rig: Rig) -> None:
    words = "its first token is estimated in 9.200 s, the limit (max_ttft) is 2.000 s"

    async def refuse(attempt: Attempt) -> None:
        await attempt.frames(["a", attempt.id, ROUTER])
        await attempt.frames(attempt.failed_frame("estimated_too_late", words, phase="queue", retry_after_s=7.2))

    rig.peer.script = refuse
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with rig.http.post(f"{rig.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert (response.status, response.headers["Retry-After"]) == (429, "8")
    assert answer["error"] == {
        "message": words,
        "type": "rate_limit_error",
        "param": None,
        "code": "estimated_too_late",
    }
    assert len(rig.peer.attempts) == 1
    async with (
        explaining(rig),
        rig.http.post(f"{rig.url}/v1/chat/completions", json=body, headers={"X-Busway-Explain": "1"}) as response,
    ):
        told = await response.json()
    assert (response.status, told["error"]) == (429, answer["error"])
    assert [way["attempt_id"] for way in told["busway"]["routing"]] == [rig.peer.last.id]


async def test_the_routers_numbers_are_at_metrics_while_they_live(rig: Rig) -> None:
    totals = RoutingTotals(
        model=MODEL,
        num_prompts=4,
        num_prompt_tokens=300,
        num_cached_tokens=80,
        num_missed_tokens=48,
        bypasses={"short prompt": 2},
        refusals={"max_ttft": 3},
        num_estimates=2,
        estimated_s=0.625,
        actual_s=0.5,
        error_sum_s=0.375,
        error_counts=(1, *([0] * (len(ERROR_BUCKETS_S) - 1)), 1),
    )
    bus = rig.fleet_bus
    for router in (ROUTER, "gone"):
        report = RouterReport(router=router, epoch=Epoch(1), totals=(totals,))
        await bus.publish(bus.subjects.router_report(router), encode(report))
    await wait_for(lambda: rig.metric("busway_router_prompts_total", router=ROUTER), lambda value: value == 4)
    expected = {
        "busway_router_prompt_tokens_total": 300,
        "busway_router_cached_tokens_total": 80,
        "busway_router_missed_tokens_total": 48,
        "busway_router_estimated_prefill_seconds_total": 0.625,
        "busway_router_prefill_seconds_total": 0.5,
        "busway_router_estimate_error_seconds_sum": 0.375,
        "busway_router_estimate_error_seconds_count": 2,
    }
    assert {name: await rig.metric(name, router=ROUTER, model=MODEL) for name in expected} == expected
    assert await rig.metric("busway_router_bypasses_total", router=ROUTER, reason="short prompt") == 2
    assert await rig.metric("busway_router_refusals_total", router=ROUTER, reason="max_ttft") == 3
    assert await rig.metric("busway_router_estimate_error_seconds_bucket", le="10.0") == 1
    assert await rig.metric("busway_router_prompts_total", router="gone") is None


async def test_a_callers_own_label_hides_no_id(rig: Rig) -> None:
    for headers, hidden in (({}, False), ({"X-Request-Id": "mine"}, True)):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with rig.http.post(f"{rig.url}/v1/chat/completions", json=body, headers=headers) as response:
            own = response.headers.get("X-Busway-Request-Id")
            asked = str(rig.peer.last.request["request_id"])
            assert own == (asked if hidden else None)
            assert response.headers["X-Request-Id"] == ("mine" if hidden else asked)
