"""Deaths, last: each costs an external engine's start."""

import pytest

from schemas.frames import Failed
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = pytest.mark.slow


async def test_prefill_killed_with_the_kv_unfetched_and_back_under_the_same_name(desk: Desk) -> None:
    """Decode gives the right text or an error, in bounded time; then it works with the new one."""
    request = desk.request(prompt(80, salt=41), 6)
    params = await desk.params(request)
    desk.pair.prefill.kill()
    got = await desk.decode(request, params)
    if not isinstance(got.end, Failed):
        assert got.ids == (await desk.aggregated(request)).ids
    desk.pair.ensure_alive()
    again = desk.request(prompt(80, salt=42), 6)
    assert (await desk.disaggregated(again)).ids == (await desk.aggregated(again)).ids
    stale = await desk.decode_if_taken(desk.request(request.token_ids, 6), params)
    assert stale is None or stale.ids == (await desk.aggregated(request)).ids


async def test_prefill_told_to_leave_stays_until_its_kv_is_fetched(desk: Desk) -> None:
    request = desk.request(prompt(80, salt=43), 6)
    params = await desk.params(request)
    desk.pair.prefill.ask_to_leave()
    got = await desk.decode(request, params)
    assert got.finished.usage.num_computed_prompt_tokens == 0
    assert await desk.pair.prefill.wait_left() == 0
    assert got.ids == (await desk.aggregated(request)).ids
