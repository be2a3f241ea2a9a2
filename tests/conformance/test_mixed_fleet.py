"""Two models on two engines behind one gateway and one router, at the same time: each request goes to its own pair."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bus.server import NatsServer
from tests.conformance.engines import EngineCase, case_named, marks
from tests.conformance.front import front, until_ready
from tests.conformance.pair import WorkerProcess
from tests.conformance.tiny_model import write_tiny_llama

FLEET = "mixed"
QUESTIONS = (
    "one two three",
    "a longer question about nothing in particular, long enough for a block or two",
    "yes or no",
)
FLEETS = [
    pytest.param(names, id="-".join(names), marks=[mark for name in names for mark in marks(case_named(name))])
    for names in (("sim", "torch"), ("torch", "vllm"), ("torch", "sglang"))
]


@pytest.fixture(params=FLEETS)
def models(request: pytest.FixtureRequest, conformance_server: NatsServer, tmp_path: Path) -> Iterator[list[str]]:
    """A prefill and a decode worker of each engine; a model is named as the engine that serves it."""
    cases = [case_named(name) for name in request.param]
    for case in cases:
        if why := case.why_not():
            pytest.skip(why)
    workers = [
        worker for seed, case in enumerate(cases) for worker in pair_of(case, conformance_server, tmp_path, seed)
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.wait_ready()
        yield [case.name for case in cases]
    finally:
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            worker.ask_to_leave()
        codes = [worker.exit_code() for worker in alive]
    assert codes == [0] * len(workers)


def pair_of(case: EngineCase, server: NatsServer, folder: Path, seed: int) -> list[WorkerProcess]:
    model = write_tiny_llama(folder / case.name, seed) if case.model == "tiny" else None
    pair = []
    for role in ("prefill", "decode"):
        own = folder / f"{case.name}-{role}"
        own.mkdir()
        pair.append(WorkerProcess(server, case, role, model, own, fleet=FLEET, served=case.name))
    return pair


async def ask(http: aiohttp.ClientSession, model: str, question: str) -> str:
    """Return the answer of this model's own pair."""
    body: dict[str, Any] = {"model": model, "prompt": question, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with http.post("/v1/completions", json=body, headers={"X-Busway-Timings": "1"}) as response:
        answer = await response.json()
    assert response.status == 200, answer
    seen = answer["busway"]
    assert (seen["prefill_worker"], seen["decode_worker"]) == (f"{model}-prefill", f"{model}-decode")
    assert (seen["num_computed_prompt_tokens"], seen["num_resubmits"]) == (0, 0)
    text: str = answer["choices"][0]["text"]
    return text


async def test_each_model_is_served_by_its_own_engines(models: list[str], conformance_server: NatsServer) -> None:
    async with front(conformance_server, FLEET) as url, aiohttp.ClientSession(url) as http:
        await until_ready(http)
        listed = await (await http.get("/v1/models")).json()
        assert sorted(one["id"] for one in listed["data"]) == sorted(models)
        asked = [(model, question) for question in QUESTIONS for model in models]
        alone = {pair: await ask(http, *pair) for pair in asked}
        assert len(set(alone.values())) == len(asked), "answers that all differ would show a request gone astray"
        async with asyncio.TaskGroup() as tasks:
            together = [(pair, tasks.create_task(ask(http, *pair))) for pair in asked * 4]
        for pair, task in together:
            assert task.result() == alone[pair]
        strange = await http.post("/v1/completions", json={"model": "nobodys", "prompt": "x"})
        assert strange.status == 404
