"""What adapters share, without any engine."""

import asyncio

import pytest

from schemas.errors import RequestError
from schemas.frames import Tokens
from schemas.ids import AttemptId
from schemas.request import GenerateRequest, Sampling
from services.engines.adapter.installed import require_version
from services.engines.adapter.refusals import refuse_inexact_resume, refuse_priority
from services.engines.adapter.tick import TickEmitter
from services.engines.protocol import EngineEvent
from tests.engines.scenes import a_request


def token(number: int) -> Tokens:
    return Tokens(AttemptId(f"{number:022d}"), 0, (number,))


async def test_what_many_requests_say_in_one_turn_is_one_emit() -> None:
    emits: list[list[EngineEvent]] = []
    ticks = TickEmitter(lambda events: emits.append(list(events)))
    step = asyncio.Event()

    async def request(number: int) -> None:
        await step.wait()
        ticks.add([token(number)])

    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(request(number))
        await asyncio.sleep(0)
        step.set()
    await asyncio.sleep(0)
    assert emits == [[token(number) for number in range(5)]]


async def test_a_flush_emits_at_once_and_only_once() -> None:
    emits: list[list[EngineEvent]] = []
    ticks = TickEmitter(lambda events: emits.append(list(events)))
    ticks.add([token(1)])
    ticks.flush()
    assert emits == [[token(1)]]
    await asyncio.sleep(0)
    ticks.add([])
    await asyncio.sleep(0)
    assert len(emits) == 1


def test_a_missing_engine_says_how_to_install_it() -> None:
    with pytest.raises(RequestError, match=r"Frobnicator is not installed.*pip install it"):
        require_version("Frobnicator", ["no-such-package"], ["1"], install="pip install it", allow_untested=False)


def test_an_untested_version_is_refused_by_name_unless_allowed(caplog: pytest.LogCaptureFixture) -> None:
    ask = {"packages": ["no-such-package", "msgspec"], "tested": ["0.0.1"], "install": ""}
    with pytest.raises(RequestError, match=r"tested with 0\.0\.1.*allow_untested=true"):
        require_version("Engine", **ask, allow_untested=False)
    found = require_version("Engine", **ask, allow_untested=True)
    assert found in caplog.text


def resumed(**sampling: object) -> GenerateRequest:
    request = a_request((1, 2, 3), resume=(4,))
    return type(request)(**{name: getattr(request, name) for name in request.__struct_fields__} | sampling)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(seed=1, temperature=0.5, is_user_seeded=True), "seed"),
        (Sampling(seed=1, temperature=0.0, presence_penalty=0.5), "presence_penalty"),
        (Sampling(seed=1, temperature=0.0, frequency_penalty=0.5), "frequency_penalty"),
    ],
)
def test_a_resume_that_would_go_on_differently_is_refused_by_name(sampling: Sampling, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        refuse_inexact_resume(resumed(sampling=sampling), "engine")
    assert refused.value.param == param


def test_greedy_and_own_seeded_resumes_go_on() -> None:
    for sampling in (Sampling(seed=1, temperature=0.0, is_user_seeded=True), Sampling(seed=1, temperature=0.5)):
        refuse_inexact_resume(resumed(sampling=sampling), "engine")


def test_a_priority_is_refused_where_it_would_be_ignored() -> None:
    request = a_request((1,), priority=2)
    refuse_priority(request, "engine", has_priorities=True, how="")
    with pytest.raises(RequestError, match="--fast"):
        refuse_priority(request, "engine", has_priorities=False, how="use --fast")
