"""One request, explained by `busway trace` and found under one id in every process's log: real processes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from schemas.trace import PhaseSeconds, Trace
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.deploy.conftest import Home, Served

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CAUSED_BY = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SLOW = ("--engine-arg", "prefill_ms_per_token=2", "--engine-arg", "decode_ms_per_step=10")


@pytest.fixture(scope="module")
def served_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.deploy.conftest import Home

    home = Home(tmp_path_factory.mktemp("home"))
    with home.serving("--log-level", "debug", "--log-format", "json", *SLOW) as served:
        yield served


def ask(served: Served, **headers: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the answer and the headers (in lower case) of one question."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "one two three four five"}], "max_tokens": 5}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response), {name.lower(): value for name, value in response.headers.items()}


def lines_of(home: Home, name: str) -> list[dict[str, Any]]:
    """Return what a process has logged; the launcher puts its name before each line."""
    rows = [line.partition("| ")[2] for line in home.log().splitlines() if line.startswith(f"{name} ")]
    return [json.loads(row) for row in rows if row.startswith("{")]


def test_a_trace_is_found_by_every_name_and_its_phases_add_up(served_module: Served) -> None:
    home = served_module.home
    answer, headers = ask(served_module, **{"x-request-id": "mine/1", "traceparent": CAUSED_BY})
    assert headers["x-request-id"] == "mine/1"
    assert headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    for name in ("mine/1", answer["id"], TRACE_ID):
        done = home.run("trace", name, "--json")
        assert done.returncode == 0, done.stderr
        trace = msgspec.json.decode(done.stdout, type=Trace)
        assert (trace.label, f"chatcmpl-{trace.request_id}") == ("mine/1", answer["id"])
    (completion,) = trace.completions
    seconds = msgspec.structs.asdict(completion.phases)
    assert set(json.loads(done.stdout)["completions"][0]["phases"]) == set(PhaseSeconds.__struct_fields__)
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(completion.total_s)
    assert sum(seconds.values()) - seconds["decode_s"] == pytest.approx(completion.ttft_s)
    assert seconds["prefill_s"] > 0.01
    assert seconds["decode_s"] > 0.01


def test_a_trace_is_shown_with_its_phases_in_milliseconds_and_its_attempts(served_module: Served) -> None:
    answer, _ = ask(served_module)
    done = served_module.home.run("trace", answer["id"])
    assert done.returncode == 0, done.stderr
    shown = [line.strip() for line in done.stdout.splitlines()]
    for phase in ("gateway", "queue", "route", "prefill queue", "prefill", "decode queue", "transfer", "first token"):
        assert any(line.startswith(phase) and " ms" in line for line in shown), phase
    assert any(line.startswith("TTFT") for line in shown)
    assert any("router-0 -> prefill-0 -> decode-0" in line for line in shown)


def test_an_unknown_id_is_a_clear_error(served_module: Served) -> None:
    for words in (("trace", "nobody"), ("trace", "nobody", "--json")):
        done = served_module.home.run(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert "none of 1 gateways knows 'nobody'" in done.stderr
        assert "Traceback" not in done.stderr


async def test_one_id_leads_through_all_logs(served_module: Served) -> None:
    answer, _ = ask(served_module, traceparent=CAUSED_BY)
    request_id = answer["id"].removeprefix("chatcmpl-")
    home = served_module.home

    def told() -> dict[str, list[dict[str, Any]]]:
        members = ("gateway-0", "router-0", "prefill-0", "decode-0")
        return {
            name: [line for line in lines_of(home, name) if line.get("request_id") == request_id] for name in members
        }

    await wait_until(lambda: all(told().values()), explain=lambda: str(told()))
    lines = told()
    assert {line["trace_id"] for several in lines.values() for line in several} == {TRACE_ID}
    (last,) = [line for line in lines["gateway-0"] if line["level"] == "info"]
    assert last["message"].startswith("chat ok model=sim")
    attempts = {line.get("attempt_id") for name in ("router-0", "prefill-0", "decode-0") for line in lines[name]}
    assert len(attempts) == 1


def test_an_x_request_id_that_cant_be_used_is_a_400_naming_the_limit(served_module: Served) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served_module, **{"x-request-id": "x" * 129})
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "X-Request-Id")
    assert "128" in error["message"]
    assert "129" in error["message"]
    assert len(refused.value.headers["X-Request-Id"]) == 22
