"""vLLM: KV that arrived, and for which prefill then doesn't vouch. The test answers in prefill's place."""

import msgspec

from schemas.errors import LeaseExpiredError
from schemas.frames import Failed
from schemas.handoff import VllmKvTransferParams
from schemas.ids import WorkerId, new_attempt_id
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict
from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = only("vllm")

STRANGER = WorkerId("stranger")


async def vouch(desk: Desk, *, before: bool, after: bool) -> list[str]:
    """Answer decode's two questions; returns a list that fills with those that were asked."""
    asked: list[str] = []

    async def lease(message: LeaseRequest, call: object) -> Verdict:
        asked.append("before")
        return verdict(before)

    async def confirm(message: ConfirmRequest, call: object) -> Verdict:
        asked.append("after")
        return verdict(after)

    await desk.bus.serve(desk.bus.subjects.peer(STRANGER, "lease"), LeaseRequest, lease)
    await desk.bus.serve(desk.bus.subjects.peer(STRANGER, "confirm"), ConfirmRequest, confirm)
    return asked


def verdict(is_good: bool) -> Verdict:
    return Verdict(is_good=is_good, error=None if is_good else LeaseExpiredError("it ran out").record())


async def kv_of_another(desk: Desk, salt: int) -> tuple[tuple[int, ...], list[int], VllmKvTransferParams]:
    """Return a prompt, its own completion, and params that lead to the KV of another prompt."""
    other = prompt(100, salt=salt)
    mine = (*prompt(99, salt=salt + 1), other[-1])
    params = await desk.params(desk.request(other, 6))
    assert isinstance(params, VllmKvTransferParams)
    own = (await desk.aggregated(desk.request(mine, 6))).ids
    return mine, own, msgspec.structs.replace(params, prefill_worker=STRANGER)


async def test_nothing_made_from_it_is_delivered_and_the_cache_is_clean(desk: Desk) -> None:
    asked = await vouch(desk, before=True, after=False)
    mine, own, params = await kv_of_another(desk, 61)
    request = desk.request(mine, 6)
    got = await desk.decode(request, params)
    assert asked == ["before", "after"]
    assert got.ids == own
    later = await desk.decode(msgspec.structs.replace(request, attempt_id=new_attempt_id()))
    assert later.ids == own, "the KV of another prompt stayed in the prefix cache"


async def test_a_completion_that_ended_meanwhile_is_not_delivered_either(desk: Desk) -> None:
    asked = await vouch(desk, before=True, after=False)
    mine, own, params = await kv_of_another(desk, 63)
    got = await desk.decode(desk.request(mine, 1), params)
    assert asked == ["before", "after"]
    assert got.ids == own[:1]
    assert (await desk.decode(desk.request(mine, 6))).ids == own


async def test_it_is_not_even_fetched_when_prefill_says_no_at_first(desk: Desk) -> None:
    asked = await vouch(desk, before=False, after=True)
    mine, own, params = await kv_of_another(desk, 65)
    got = await desk.decode(desk.request(mine, 6), params)
    assert asked == ["before"]
    assert got.ids == own


async def test_a_prefill_that_is_gone_vouches_for_nothing(desk: Desk) -> None:
    mine, own, params = await kv_of_another(desk, 67)
    got = await desk.decode(desk.request(mine, 6), params)
    assert isinstance(got.end, Failed) or got.ids == own
