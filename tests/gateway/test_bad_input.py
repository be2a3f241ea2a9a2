"""Bad input gets a 4xx that names field and limit, at once, and the service goes on."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import pytest

from bus.server import NatsServer
from tests.gateway.conftest import MODEL, Rig, open_rig, runtime_config, wait_served

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MIB = 1024 * 1024

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **fields}


CASES: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, b"{", 400, None, "not valid JSON"),
    (CHAT, b"", 400, None, "not valid JSON"),
    (CHAT, b"[1]", 400, None, "an array"),
    (CHAT, b"null", 400, None, "null"),
    (CHAT, b'{"model": "\xff"}', 400, None, "not valid UTF-8"),
    (CHAT, b'{"model": "m", "temperature": NaN}', 400, None, "not valid JSON"),
    (CHAT, b'{"model": "m", "messages": "\\ud800"}', 400, None, "not valid JSON"),
    (CHAT, b'{"a":' * 5000, 400, None, "depth limit"),
    (CHAT, {"messages": HI}, 400, "model", "required"),
    (CHAT, {"model": MODEL}, 400, "messages", "required"),
    (CHAT, chat(model="nope"), 404, "model", "'nope' does not exist"),
    (CHAT, chat(model=3), 400, "model", "expected `str`"),
    (CHAT, chat(messages=[]), 400, "messages", "length >= 1"),
    (CHAT, chat(messages="hi"), 400, "messages", "expected `array`"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "required"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role", "required"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages[0].role", "invalid enum value"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content", "expected"),
    (CHAT, chat(messages=[*HI, {"role": "tool", "content": "x"}]), 400, "messages[1].role", "tool"),
    (CHAT, chat(messages=HI * 4097), 400, "messages", "4096"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0]",
        "only text parts",
    ),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens", ">= 1"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", ">= 1"),
    (CHAT, chat(max_tokens="5"), 400, "max_tokens", "expected `int"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "expected `int"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", "expected `int"),
    (CHAT, chat(max_tokens=513), 400, "messages", "512"),
    (CHAT, chat(max_completion_tokens=513), 400, "messages", "max_tokens 513"),
    (CHAT, chat(messages=[{"role": "user", "content": "ab " * 2000}]), 400, "messages", "512"),
    (CHAT, chat(messages=[{"role": "user", "content": "ab " * 2_000_000}]), 400, "messages", "at least"),
    (CHAT, chat(min_tokens=9, max_tokens=8), 400, "min_tokens", "max_tokens 8"),
    (CHAT, chat(temperature=3), 400, "temperature", "2.0"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "expected `float"),
    (CHAT, chat(top_p=0), 400, "top_p", "> 0.0"),
    (CHAT, chat(top_k=-2), 400, "top_k", ">= -1"),
    (CHAT, chat(n=0), 400, "n", ">= 1"),
    (CHAT, chat(n=17), 400, "n", "the limit is 16"),
    (CHAT, chat(n=10**9), 400, "n", "the limit is 16"),
    (CHAT, chat(seed=2**63), 400, "seed", "<="),
    (CHAT, chat(stop=["x"] * 17), 400, "stop", "16"),
    (CHAT, chat(stop=[""]), 400, "stop[0]", "length >= 1"),
    (CHAT, chat(stop=[1]), 400, "stop[0]", "expected `str`"),
    (CHAT, chat(stop_token_ids=[10**6]), 400, "stop_token_ids", "vocabulary"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "20"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "logprobs=true"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream=true"),
    (CHAT, chat(stream="yes"), 400, "stream", "expected `bool"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format", "not supported"),
    (CHAT, chat(logit_bias={"5": 100}), 400, "logit_bias", "not supported"),
    (CHAT, chat(chat_template="{{ x }}"), 400, "chat_template", "not supported"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs.messages", "set by the server"),
    (CHAT, chat(kv_transfer_params={}), 400, "kv_transfer_params", "hand-off"),
    (CHAT, chat(bootstrap_room=5), 400, "bootstrap_room", "hand-off"),
    (CHAT, chat(data_parallel_rank=None), 400, "data_parallel_rank", "hand-off"),
    (CHAT, chat(metadata={"a": [{"b": {"opaque_state": "x"}}]}), 400, "metadata.a[0].b.opaque_state", "hand-off"),
    (CHAT, chat(messages=[{**HI[0], "kv_ticket": 1}]), 400, "messages[0].kv_ticket", "hand-off"),
    (TEXT, completion(prompt=None), 400, "prompt", "is wanted"),
    (TEXT, completion(prompt=[]), 400, "prompt", "non-empty"),
    (TEXT, completion(prompt=""), 400, "prompt", "empty"),
    (TEXT, completion(prompt=[[]]), 400, "prompt[0]", "length >= 1"),
    (TEXT, completion(prompt=[1, "a"]), 400, "prompt", "prompt[1]"),
    (TEXT, completion(prompt=[1, -1]), 400, "prompt", ">= 0"),
    (TEXT, completion(prompt=["a", 3]), 400, "prompt[1]", "is wanted"),
    (TEXT, completion(prompt=[10**6]), 400, "prompt", "vocabulary"),
    (TEXT, completion(prompt=[5] * 512), 400, "prompt", "512"),
    (TEXT, completion(prompt=["a"] * 129), 400, "prompt", "128"),
    (TEXT, completion(prompt=["a"] * 100, n=2), 400, "n", "128"),
    (TEXT, completion(logprobs=21), 400, "logprobs", "20"),
    (TEXT, completion(echo=True), 400, "echo", "not supported"),
    (TEXT, completion(suffix="x"), 400, "suffix", "not supported"),
    (TEXT, completion(best_of=2), 400, "best_of", "not supported"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), CASES)
async def test_bad_input_is_a_4xx_naming_field_and_limit(
    rig: Rig, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    started = perf_counter()
    got, answer = await rig.post(path, body)
    assert perf_counter() - started < 2.0
    assert got == status, answer
    error = answer["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not rig.peer.attempts


async def test_the_service_is_unharmed_after_bad_input(rig: Rig) -> None:
    for path, body, status, _, _ in CASES:
        assert (await rig.post(path, body))[0] == status
    status, answer = await rig.chat()
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello, world")


HARMLESS: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"logit_bias": {}},
    {"echo": False},
    {"best_of": 1},
    {"functions": []},
    {"modalities": ["text"]},
    {"stop": []},
    {"stop": None},
    {"max_tokens": None},
    {"temperature": None},
    {"n": None},
    {"stream": None},
    {"seed": -5},
    {"top_k": -1},
    {"user": "u", "metadata": {"k": "v"}, "store": False},
    {"temperature": 1},
]


@pytest.mark.parametrize("fields", HARMLESS)
async def test_defaults_that_ask_for_nothing_are_taken(rig: Rig, fields: dict[str, Any]) -> None:
    status, answer = await rig.chat(**fields)
    assert status == 200, answer


async def test_text_parts_are_joined(rig: Rig) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    status, _ = await rig.chat(messages=[{"role": "developer", "content": parts}])
    assert status == 200
    prompt = rig.tokenizer.decode(rig.peer.last.request["token_ids"], skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\none\ntwo<|im_end|>")


async def test_unknown_fields_are_ignored_and_named(rig: Rig) -> None:
    body = chat(some_new_field=1, reasoning_effort="low")
    async with rig.http.post(rig.url + CHAT, json=body) as response:
        assert response.status == 200
        assert response.headers["X-Busway-Ignored"] == "reasoning_effort, some_new_field"


async def test_a_body_over_the_limit_is_refused_by_its_length_alone(rig: Rig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20971520\r\n\r\n")
    started = perf_counter()
    head = await reader.readuntil(b"\r\n\r\n")
    assert perf_counter() - started < 0.5
    assert b" 413 " in head
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    assert "20971520" in error["message"]
    assert str(8 * MIB) in error["message"]
    writer.close()


async def test_a_body_that_waits_to_be_asked_for_is_never_asked_for_when_too_large(rig: Rig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
    writer.write(b"Content-Length: 20971520\r\n\r\n")
    assert b" 413 " in await reader.readuntil(b"\r\n")
    writer.close()


async def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(rig: Rig) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * MIB

    async with rig.http.post(rig.url + CHAT, data=endless()) as response:
        assert response.status == 413
        assert str(8 * MIB) in (await response.json())["error"]["message"]


async def test_twenty_megabytes_of_garbage_are_refused_at_once(rig: Rig) -> None:
    started = perf_counter()
    status, answer = await rig.post(CHAT, b"x" * (20 * MIB))
    assert status == 413, answer
    assert perf_counter() - started < 2.0


async def test_a_compressed_body_is_limited_by_what_it_unpacks_to(rig: Rig) -> None:
    bomb = gzip.compress(b" " * (20 * MIB))
    status, answer = await rig.post(CHAT, bomb, headers={"Content-Encoding": "gzip"})
    assert status == 413, answer
    status, answer = await rig.post(CHAT, b"abc", headers={"Content-Encoding": "gzip"})
    assert status == 400, answer
    good = gzip.compress(json.dumps(chat()).encode())
    assert (await rig.post(CHAT, good, headers={"Content-Encoding": "gzip"}))[0] == 200


async def worst_stall_s(rig: Rig, path: str, body: Any) -> tuple[int, float]:
    """Return the status of a request and the longest time that the event loop was kept from others meanwhile."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            started = perf_counter()
            await asyncio.sleep(0.002)
            worst = max(worst, perf_counter() - started - 0.002)

    payload = json.dumps(body).encode()
    watcher = asyncio.get_running_loop().create_task(watch())
    status, _ = await rig.post(path, payload)
    watcher.cancel()
    return status, worst


async def test_long_prompts_do_not_stall_the_streams(nats_server: NatsServer) -> None:
    roomy = runtime_config("w", "both", max_context_tokens=4_000_000, total_kv_blocks=1_000_000)
    async with open_rig(nats_server, "roomy", workers=(roomy,)) as rig:
        await wait_served(rig)
        text = "the quick brown fox jumps over the lazy dog \N{SNOWMAN} " * 20_000
        for path, body in ((TEXT, completion(prompt=text)), (CHAT, chat(messages=[{"role": "user", "content": text}]))):
            started = perf_counter()
            status, stall_s = await worst_stall_s(rig, path, body)
            assert status == 200
            assert stall_s < max(0.2, (perf_counter() - started) / 3)
        assert len(rig.peer.last.request["token_ids"]) > 200_000


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("POST", "/v1/nothing", 404), ("DELETE", "/ready", 405)]
)
async def test_wrong_routes_are_errors_in_openai_form(rig: Rig, method: str, path: str, status: int) -> None:
    async with rig.http.request(method, rig.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"
