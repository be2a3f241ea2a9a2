"""The official openai client against a whole gateway, streaming and not."""

import asyncio
from collections import defaultdict
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import MODEL, Rig
from tests.gateway.peer import Attempt
from tests.gateway.vocabularies import IM_END

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "Größe 🙂👩‍👩‍👧‍👦 日本語, the quick brown fox"


@pytest.fixture
def client(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


async def collect(stream: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Return texts and finish reasons by choice, and all chunks, of a chat stream."""
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


async def test_a_chat_answers_with_text_reason_and_usage(rig: Rig, client: AsyncOpenAI) -> None:
    ids = rig.says(TEXT)
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.prompt_tokens == len(rig.peer.last.request["token_ids"])
    assert answer.usage.prompt_tokens_details is not None


async def test_the_prompt_is_the_models_own_template_around_the_messages(rig: Rig, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(model=MODEL, messages=[{"role": "system", "content": "Be kind."}, *HI])
    prompt = rig.tokenizer.decode(rig.peer.last.request["token_ids"], skip_special_tokens=False)
    assert prompt == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_stream_is_the_same_text_with_the_same_reason(rig: Rig, client: AsyncOpenAI) -> None:
    ids = rig.says(TEXT)
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, chunks = await collect(stream)
    assert texts == {0: TEXT}
    assert reasons == {0: "stop"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids) + 1
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens_bounds_the_ids_and_the_count(rig: Rig, client: AsyncOpenAI, max_tokens: int) -> None:
    ids = rig.says("the quick brown fox")
    answer = await client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=max_tokens)
    assert answer.choices[0].message.content == rig.tokenizer.decode(ids[:max_tokens])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens


async def test_n_gives_distinct_attempts_with_derived_seeds(rig: Rig, client: AsyncOpenAI) -> None:
    async def speak_by_seed(attempt: Attempt) -> None:
        ids = rig.tokenizer.encode(f"seed {attempt.request['sampling']['seed']}").ids
        await attempt.begin()
        for token_id in [*ids, IM_END]:
            await attempt.frames(attempt.tokens_frame([token_id]))
        await attempt.frames(attempt.finished_frame("stop"))

    rig.peer.script = speak_by_seed
    answer = await client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == ["seed 7", "seed 8", "seed 9"]
    assert len({attempt.id for attempt in rig.peer.attempts}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rig.peer.last.request["token_ids"])
    stream = await client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7, stream=True)
    texts, reasons, _ = await collect(stream)
    assert texts == {0: "seed 7", 1: "seed 8", 2: "seed 9"}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


async def test_one_failing_sibling_aborts_the_others(rig: Rig, client: AsyncOpenAI) -> None:
    async def fail_the_second(attempt: Attempt) -> None:
        await attempt.begin()
        if attempt.request["sampling"]["seed"] == 8:
            await attempt.frames(attempt.failed_frame("engine_failed", "out of luck"))
            return
        await attempt.frames(attempt.tokens_frame([5]))
        await attempt.is_aborted.wait()

    rig.peer.script = fail_the_second
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        await client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)


def scores(token_id: int) -> list[Any]:
    return [-0.5, [[token_id, -0.5], [token_id + 1, -1.5]]]


async def test_chat_logprobs_have_one_entry_per_token_with_bytes(rig: Rig, client: AsyncOpenAI) -> None:
    ids = rig.says("é\U0001f9ff ok", logprobs=scores)
    answer = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    assert rig.peer.last.request["num_logprobs"] == 2
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens == len(ids) + 1
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode() == "é\U0001f9ff ok"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert not any("\ufffd" in entry.token for entry in content)
    stream = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, stream=True)
    _, _, chunks = await collect(stream)
    streamed = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert streamed == content


async def test_completion_logprobs_have_the_legacy_form(rig: Rig, client: AsyncOpenAI) -> None:
    ids = rig.says("the fox", logprobs=scores)
    answer = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs == [-0.5] * (len(ids) + 1)
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens[:-1], logprobs.text_offset, strict=False):
        assert answer.choices[0].text[offset:].startswith(token)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs or [], strict=True))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_aborts_its_request(
    rig: Rig, client: AsyncOpenAI, is_stream: bool
) -> None:
    ids = rig.tokenizer.encode("one two STOP three").ids

    async def go_on(attempt: Attempt) -> None:
        await attempt.begin()
        for token_id in ids:
            await attempt.frames(attempt.tokens_frame([token_id]))
        await attempt.is_aborted.wait()

    rig.peer.script = go_on
    options: Any = {"model": MODEL, "messages": HI, "stop": ["nothing", " STOP"]}
    num_expected = next(k for k in range(len(ids)) if " STOP" in rig.tokenizer.decode(ids[:k]))
    if is_stream:
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        texts, reasons, chunks = await collect(stream)
        text, reason, usage = texts[0], reasons[0], chunks[-1].usage
    else:
        answer = await client.chat.completions.create(**options)
        text, reason, usage = answer.choices[0].message.content or "", answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == ("one two", "stop")
    assert usage.completion_tokens == num_expected
    async with asyncio.timeout(1.0):
        await rig.peer.last.is_aborted.wait()


async def test_a_withheld_beginning_of_a_stop_string_comes_at_the_end(rig: Rig, client: AsyncOpenAI) -> None:
    rig.says("one two ST")
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stop="STOP", stream=True)
    texts, reasons, _ = await collect(stream)
    assert texts[0] == "one two ST"
    assert reasons[0] == "stop"


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("abc", 1), (["abc", "de"], 2), ([70, 71, 72], 1), ([[70, 71], [72]], 2)],
)
async def test_completions_take_every_form_of_prompt(
    rig: Rig, client: AsyncOpenAI, prompt: Any, num_choices: int
) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(num_choices * 2))
    assert {choice.text for choice in answer.choices} == {"Hello, world"}
    stream = await client.completions.create(model=MODEL, prompt=prompt, n=2, stream=True)
    texts: dict[int, str] = defaultdict(str)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == dict.fromkeys(range(num_choices * 2), "Hello, world")


async def test_every_sampling_parameter_reaches_the_bus(rig: Rig, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        frequency_penalty=0.25,
        presence_penalty=-0.25,
        max_tokens=9,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "cache_salt": "tenant",
        },
    )
    request = rig.peer.last.request
    assert request["sampling"] == {
        "seed": 11,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.2,
        "is_user_seeded": True,
    }
    assert request["stop"] == {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]}
    assert request["cache_salt"] == "tenant"
    assert request["model_digest"] == "digest-1"


async def test_errors_come_as_the_clients_own_exceptions(rig: Rig, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="nope", messages=HI)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=600, stream=True)
    assert overflow.value.code == "context_length_exceeded"
    assert "600" in str(overflow.value)
    assert "512" in str(overflow.value)
    rig.peer.refusal = {"type": "error.v1", "code": "overloaded", "message": "full", "retry_after_s": 2.5}
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert full.value.response.headers["retry-after"] == "3"


async def test_a_failure_in_mid_stream_is_an_error_and_no_end(rig: Rig, client: AsyncOpenAI) -> None:
    async def fail_late(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame(rig.tokenizer.encode("so far").ids))
        await attempt.frames(attempt.failed_frame("worker_lost", "decode is gone"))

    rig.peer.script = fail_late
    before = await rig.metric("busway_gateway_requests_total", outcome="worker_lost") or 0.0
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    heard: list[Any] = []

    async def listen() -> None:
        async for chunk in stream:
            heard.append(chunk.choices[0])

    with pytest.raises(openai.APIError, match="decode is gone"):
        await listen()
    assert "".join(choice.delta.content or "" for choice in heard) == "so far"
    assert not any(choice.finish_reason for choice in heard)
    assert await rig.metric("busway_gateway_requests_total", outcome="worker_lost") == before + 1


async def test_models_are_listed_and_shown(rig: Rig, client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")
