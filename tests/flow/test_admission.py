"""Admission by estimate with real workers: refused at once while the queue is too long, taken when it isn't."""

import asyncio
import time
from pathlib import Path

import pytest

from bus.server import NatsServer
from schemas.errors import AdmissionError
from schemas.request import Deadlines
from services.config import PolicyName
from services.router import dispatch
from services.router.estimates import FEW_PASSES
from tests.flow.stack import Outcome, Stack, stack

NUM_ASKED = 8


def a_prompt(seed: int, num_tokens: int) -> list[int]:
    return [100 + seed, *range(300, 299 + num_tokens)]


async def measured(here: Stack, num_tokens: int = 100) -> None:
    """Let the prefill worker make enough passes for an estimate and tell of them."""
    for seed in range(FEW_PASSES):
        await here.generate(a_prompt(200 + seed, num_tokens), max_tokens=2)
    await here.all_free()
    await here.reported_idle("p0")


class Crowd:
    """Requests that come together; the first refusal is told while the others go on."""

    def __init__(self, here: Stack, tasks: asyncio.TaskGroup, num_tokens: int, deadlines: Deadlines) -> None:
        self.taken: list[Outcome] = []
        self.refusals: list[AdmissionError] = []
        self.is_refused = asyncio.Event()
        self._here = here
        self._deadlines = deadlines
        self.tasks = [tasks.create_task(self._ask(a_prompt(seed, num_tokens))) for seed in range(NUM_ASKED)]

    async def _ask(self, prompt: list[int]) -> None:
        try:
            self.taken.append(await self._here.generate(prompt, max_tokens=2, deadlines=self._deadlines))
        except AdmissionError as error:
            self.refusals.append(error)
            self.is_refused.set()


async def test_a_request_behind_a_long_queue_is_refused_at_once_and_taken_when_it_is_short(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """A prompt takes 0.2 s: some fit the limit, not all. Nothing gets on until somebody has been refused."""
    engine_args = {"prefill_ms_per_token": "0.5", "max_batched_tokens": "400", "pause_dir": str(tmp_path)}
    router: dict[str, object] = {"kv_max_ttft_s": 1.0}
    async with stack(nats_server, "p0", "d0", policy="kv", engine_args=engine_args, router=router) as here:
        await measured(here, 400)
        before = here["p0"].load().num_prompt_tokens
        pause = tmp_path / "before_prefill.pause"
        pause.touch()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            crowd = Crowd(here, tasks, 400, Deadlines())
            await crowd.is_refused.wait()
            assert crowd.taken == []
            pause.unlink()
        assert len(crowd.taken) + len(crowd.refusals) == NUM_ASKED
        for error in crowd.refusals:
            assert error.http_status == 429
            assert error.retry_after_s is not None
            assert error.retry_after_s > 0
            assert "the limit (max_ttft) is 1.000 s" in error.message
        assert here["p0"].load().num_prompt_tokens - before == 400 * len(crowd.taken) > 0
        await here.all_free()
        await here.reported_idle("p0")
        assert (await here.generate(a_prompt(77, 400), max_tokens=2)).finished.reason == "length"


async def test_a_deadline_for_the_first_token_refuses_as_well(nats_server: NatsServer) -> None:
    """A prompt takes 8 s of the 20 that each has: two fit, a third doesn't."""
    engine_args = {"prefill_ms_per_token": "2", "max_batched_tokens": "64"}
    async with stack(nats_server, "p0", "d0", policy="kv", engine_args=engine_args) as here:
        await measured(here, 64)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            crowd = Crowd(here, tasks, 4000, Deadlines(first_token=time.time() + 20.0))
            await crowd.is_refused.wait()
            for task in crowd.tasks:
                task.cancel()
        assert crowd.taken == []
        assert "first_token_deadline" in crowd.refusals[0].message
        await here.all_free()
        await here.reported_idle("p0")
        late = Deadlines(first_token=time.time() + 20.0)
        assert (await here.generate(a_prompt(77, 64), max_tokens=2, deadlines=late)).finished.reason == "length"


async def test_without_an_estimate_everybody_is_taken_and_a_refusal_is_explained(nats_server: NatsServer) -> None:
    router: dict[str, object] = {"kv_max_ttft_s": 1e-6}
    async with stack(nats_server, "p0", "d0", policy="kv", router=router) as here:
        await measured(here)
        refused: list[str] = []
        with pytest.raises(AdmissionError):
            await here.generate(a_prompt(2, 100), on_frame=lambda frame: bool(refused.append(frame.attempt_id)))
        refusal = (await here.explain(refused[0])).refusal
        assert refusal is not None
        assert (refusal.reason, refusal.limit_s) == ("max_ttft", 1e-6)
        assert refusal.estimate_s > refusal.limit_s
        assert here["p0"].load().num_prompt_tokens == FEW_PASSES * 100


async def test_while_estimates_refuse_everybody_an_idle_worker_gets_one_now_and_then(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    router: dict[str, object] = {"kv_max_ttft_s": 1e-6}
    async with stack(nats_server, "p0", "d0", policy="kv", router=router) as here:
        await measured(here)
        with pytest.raises(AdmissionError):
            await here.generate(a_prompt(2, 100), max_tokens=2)
        monkeypatch.setattr(dispatch, "TRIAL_EVERY_S", 0.0)
        assert (await here.generate(a_prompt(3, 100), max_tokens=2)).finished.reason == "length"


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_policies_without_estimates_refuse_nobody_by_them(nats_server: NatsServer, policy: PolicyName) -> None:
    router: dict[str, object] = {"kv_max_ttft_s": 1e-6}
    async with stack(nats_server, "p0", "d0", policy=policy, router=router) as here:
        await measured(here)
        assert (await here.generate(a_prompt(1, 100), max_tokens=2)).finished.reason == "length"
