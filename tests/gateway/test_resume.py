"""A stream whose worker is lost in the middle: the user sees one answer, without a seam."""

import json
from collections.abc import Sequence

import pytest

from tests.conftest import wait_until
from tests.gateway.conftest import Rig
from tests.gateway.peer import DECODE, ROUTER, Attempt, Script
from tests.gateway.test_streams import Wire, chat
from tests.gateway.vocabularies import IM_END

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Größe 🙂 two words, and a STOP sign at the end"


def break_after(num: int, ids: Sequence[int], *, is_exact: bool) -> Script:
    """Send the ids; the first attempt is lost after `num` of them, the next goes on from what it is told."""

    async def script(attempt: Attempt) -> None:
        await attempt.frames(["a", attempt.id, ROUTER])
        await attempt.frames(["d", attempt.id, DECODE, is_exact])
        resumed = attempt.request.get("resume", [])
        attempt.num_sent = len(resumed)
        rest = list(ids[len(resumed) :])
        if not resumed:
            await attempt.frames(["b", attempt.id, {}, 16])
            for token_id in rest[:num]:
                await attempt.frames(attempt.tokens_frame([token_id]))
            await attempt.frames(attempt.failed_frame("worker_lost", "gone"))
            return
        await attempt.frames(attempt.tokens_frame([*rest, IM_END]), attempt.finished_frame("stop", cached_tokens=64))

    return script


def content_of(body: bytes) -> str:
    events = [event[6:] for event in body.split(b"\n\n") if event and event != b"data: [DONE]"]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("is_exact", [True, False])
async def test_a_stream_goes_on_at_any_token_as_if_nothing_had_been(rig: Rig, is_exact: bool) -> None:
    ids = rig.tokenizer.encode(TEXT).ids
    for num in range(1, len(ids)):
        rig.peer.script = break_after(num, ids, is_exact=is_exact)
        wire = await Wire.post(rig, chat(stream_options={"include_usage": True}))
        await wire.head()
        body = await wire.rest()
        wire.close()
        assert content_of(body) == TEXT
        assert body.count(b"[DONE]") == 1
        assert body.count(b'"finish_reason":"stop"') == 1
        assert (b'"resumed":true' in body) == (not is_exact)
        first, second = rig.peer.attempts[-2:]
        assert second.request["resume"] == ids[:num]
        assert second.request["avoid"] == [DECODE]
        assert second.id != first.id
        usage = json.loads(body.split(b"\n\n")[-3][6:])["usage"]
        num_prompt = len(first.request["token_ids"])
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, len(ids) + 1)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16


async def test_an_unstreamed_answer_goes_on_too_and_says_so(rig: Rig) -> None:
    ids = rig.tokenizer.encode(TEXT).ids
    before = await rig.metric("busway_resumes_total", reason="worker_lost") or 0.0
    rig.peer.script = break_after(5, ids, is_exact=False)
    status, answer = await rig.chat(busway={"timings": True})
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["resumed"]) == (TEXT, "stop", True)
    assert answer["busway"]["num_resubmits"] == 1
    assert await rig.metric("busway_resumes_total", reason="worker_lost") == before + 1


async def test_a_stop_string_is_found_across_the_seam(rig: Rig) -> None:
    ids = rig.tokenizer.encode(TEXT).ids
    ends = [len(rig.tokenizer.decode(ids[:num])) for num in range(len(ids))]
    inside = [num for num, end in enumerate(ends) if TEXT.index("STOP") < end < TEXT.index("STOP") + 4]
    assert inside
    for num in inside:
        rig.peer.script = break_after(num, ids, is_exact=True)
        wire = await Wire.post(rig, chat(stop=["STOP"]))
        await wire.head()
        body = await wire.rest()
        wire.close()
        assert content_of(body) == TEXT[: TEXT.index("STOP")]
        assert body.count(b"[DONE]") == 1


async def test_a_users_seed_on_an_engine_that_cant_continue_it_is_an_error_event(rig: Rig) -> None:
    ids = rig.tokenizer.encode(TEXT).ids
    rig.peer.script = break_after(5, ids, is_exact=False)
    wire = await Wire.post(rig, chat(seed=7))
    await wire.head()
    body = await wire.rest()
    wire.close()
    assert b'"code":"worker_lost"' in body
    assert b"seeded" in body
    assert b"[DONE]" not in body
    status, answer = await rig.chat(seed=7, temperature=0)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, TEXT)


async def test_an_answer_that_lacks_only_its_end_is_complete(rig: Rig) -> None:
    ids = [*rig.tokenizer.encode(TEXT).ids, IM_END]
    rig.peer.script = break_after(len(ids), ids, is_exact=False)
    num_before = len(rig.peer.attempts)
    status, answer = await rig.chat(seed=7)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert len(rig.peer.attempts) == num_before + 1
    await wait_until(lambda: not rig.peer.tasks)
