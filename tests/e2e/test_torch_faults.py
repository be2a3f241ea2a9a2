"""Real model, real processes, real signals: a torch worker is killed in mid-stream, another changes its role."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from services.config import HandoffMode
from tests.e2e.conftest import TORCH_FLAGS, Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "Once upon a time there was a lighthouse keeper who"
NUM_TOKENS = 60
FEW_TOKENS = 12
SEED = 20_011


@pytest.fixture(scope="module", params=["pull", "rendezvous"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1 prefill and 2 decode workers with SmolLM2 in float32."""
    handoff: HandoffMode = request.param
    flags = ("--prefill", "1", "--decode", "2", "--handoff", handoff, *TORCH_FLAGS)
    with running_stack(tmp_path_factory.mktemp(f"faults-{handoff}"), *flags) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, stack: Stack, temperature: float, max_tokens: int = NUM_TOKENS, **fields: Any) -> Any:
    return client.completions.create(
        model=stack.model,
        prompt=PROMPT,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=SEED,
        extra_headers={"X-Busway-Timings": "1"},
        **fields,
    )


def until(claim: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.05)


def workers(stack: Stack, **wanted: object) -> list[dict[str, Any]]:
    """Return the workers of which all this is so."""
    rows: list[dict[str, Any]] = stack.status()["workers"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_goes_on_at_the_very_token_when_its_worker_is_killed(
    stack: Stack, client: openai.OpenAI, temperature: float
) -> None:
    """With a seed of the user's as well: noise is positional, and float32 is exact."""
    until(lambda: len(workers(stack, role="decode", state="ready")) == 2)
    whole = ask(client, stack, temperature)
    text, victim = "", ""
    for chunk in ask(client, stack, temperature, stream=True, stream_options={"include_usage": True}):
        text += chunk.choices[0].text if chunk.choices else ""
        if len(text) > 40 and not victim:
            (holder,) = workers(stack, role="decode", running=1)
            victim = holder["worker_id"]
            os.kill(holder["pid"], signal.SIGKILL)
    assert text == whole.choices[0].text
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    timings = chunk.model_extra["busway"]
    assert (timings["num_resubmits"], timings["decode_worker"] != victim) == (1, True)
    until(lambda: workers(stack, worker_id=victim, state="ready"))
    stack.assert_idle()


def test_a_running_worker_serves_in_another_role_with_the_weights_it_has(stack: Stack, client: openai.OpenAI) -> None:
    until(lambda: len(workers(stack, role="decode", state="ready")) == 2)
    expected = ask(client, stack, 1.0, FEW_TOKENS).choices[0].text
    (before,) = workers(stack, worker_id="decode-1")
    num_loads = stack.log.read_text().count("KV blocks")
    change_role(stack, "decode-1", "prefill")
    prefilled_by = set()
    for _ in range(4):
        answer = ask(client, stack, 1.0, FEW_TOKENS)
        assert answer.choices[0].text == expected
        prefilled_by.add(answer.model_extra["busway"]["prefill_worker"])
    assert "decode-1" in prefilled_by
    change_role(stack, "decode-1", "decode")
    (after,) = workers(stack, worker_id="decode-1")
    assert (after["pid"], after["epoch"], after["role"]) == (before["pid"], before["epoch"], "decode")
    assert stack.log.read_text().count("KV blocks") == num_loads
    stack.assert_idle()


def change_role(stack: Stack, worker: str, role: str) -> None:
    command = [sys.executable, "-m", "deploy.cli", "role", worker, role]
    done = subprocess.run(command, env=stack.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
