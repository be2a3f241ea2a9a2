"""What an adapter's legs share."""

import asyncio

import pytest

from schemas.errors import BuswayError, DeadlineError, UnavailableError
from schemas.ids import AttemptId, Epoch, WorkerId, new_attempt_id
from services.engines.adapter.site import AdapterSite, running
from services.engines.adapter.tick import TickEmitter
from services.engines.paged.limits import Limits
from services.engines.tasks import spawner
from tests.engines.paged.fleet import LocalLink


class Leg:
    def __init__(self) -> None:
        self.aborts: list[BuswayError | None] = []

    def abort(self, error: BuswayError | None) -> None:
        self.aborts.append(error)


def a_site(tasks: asyncio.TaskGroup) -> AdapterSite[Leg]:
    return AdapterSite[Leg](
        worker=WorkerId("w"),
        epoch=Epoch(1),
        limits=Limits(num_blocks=1, block_size=1, max_num_seqs=1, max_batched_tokens=1, max_context_tokens=1),
        link=LocalLink(),
        ticks=TickEmitter(lambda events: None),
        spawn=spawner(tasks),
    )


async def test_an_abort_reaches_the_attempts_own_leg_with_the_error_that_was_sent() -> None:
    mine, other = new_attempt_id(), new_attempt_id()
    async with asyncio.TaskGroup() as tasks:
        site = a_site(tasks)
        site.legs.update({mine: Leg(), other: Leg()})
        site.abort_attempt(mine, None)
        site.abort_attempt(mine, DeadlineError("too late", phase="decode").record())
        site.abort_attempt(AttemptId("nobody's"), None)
    first, second = site.legs[mine].aborts
    assert first is None
    assert isinstance(second, DeadlineError)
    assert second.phase == "decode"
    assert site.legs[other].aborts == []


async def test_two_engines_of_a_process_share_no_legs_and_no_totals() -> None:
    async with asyncio.TaskGroup() as tasks:
        one, two = a_site(tasks), a_site(tasks)
    one.legs[new_attempt_id()] = Leg()
    one.totals.num_prompt_tokens += 1
    assert (two.legs, two.totals.num_prompt_tokens) == ({}, 0)


def test_an_engine_that_isnt_ready_is_a_clear_refusal() -> None:
    with pytest.raises(UnavailableError, match="isn't ready"):
        running(None)
