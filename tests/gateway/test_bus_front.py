"""The OpenAI API over NATS, driven by bare nats-py with the client user's rights."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as NatsClient

from bus.server import NatsServer
from tests.conftest import wait_until
from tests.gateway.conftest import MODEL, Rig, in_task_of_its_own, open_rig, wait_served
from tests.gateway.peer import Attempt

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "busway.v1.openai.chat.org=2Ftiny-1=2E0"
TEXT = "busway.v1.openai.completions.org=2Ftiny-1=2E0"
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(rig: Rig) -> AsyncIterator[NatsClient]:
    connection = await nats.connect(rig.nats_url, inbox_prefix="_INBOX.someone")
    yield connection
    await connection.close()


async def ask(client: NatsClient, subject: str, body: Any) -> Any:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads((await client.request(subject, payload, timeout=5)).data)


async def stream(client: NatsClient, subject: str, body: Any) -> list[bytes]:
    """Return every message of the answer up to [DONE] or an error."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subject, json.dumps(body).encode(), reply=inbox)
    messages: list[bytes] = []
    while not messages or not (messages[-1] == b"[DONE]" or b'"error"' in messages[-1]):
        messages.append((await subscription.next_msg(timeout=5)).data)
    await subscription.unsubscribe()
    return messages


async def test_a_request_is_answered_by_one_message(rig: Rig, client: NatsClient) -> None:
    answer = await ask(client, CHAT, {"messages": HI})
    assert answer["choices"][0]["message"]["content"] == "Hello, world"
    assert answer["model"] == MODEL
    answer = await ask(client, TEXT, {"prompt": "x", "model": MODEL})
    assert answer["choices"][0]["text"] == "Hello, world"


async def test_a_stream_is_a_message_per_chunk_and_done_at_last(rig: Rig, client: NatsClient) -> None:
    messages = await stream(client, CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}})
    assert messages[-1] == b"[DONE]"
    chunks = [json.loads(message) for message in messages[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == "Hello, world"
    assert chunks[-1]["usage"]["completion_tokens"] > 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ({"messages": []}, 400, "messages"),
        ({"messages": HI, "model": "other"}, 400, "model"),
        ({"messages": HI, "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ({"messages": HI, "max_tokens": 10_000}, 400, "messages"),
    ],
)
async def test_errors_are_openais_with_the_status_inside(
    rig: Rig, client: NatsClient, body: Any, status: int, param: str | None
) -> None:
    error = (await ask(client, CHAT, body))["error"]
    assert (error["status"], error["param"]) == (status, param)


async def test_a_failure_in_mid_stream_is_the_last_message(rig: Rig, client: NatsClient) -> None:
    async def fail(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        await attempt.frames(attempt.failed_frame("worker_lost", "gone"))

    rig.peer.script = fail
    messages = await stream(client, CHAT, {"messages": HI, "stream": True})
    assert json.loads(messages[-1])["error"]["status"] == 500
    assert not any(b'"finish_reason":"' in message for message in messages)


async def test_an_answer_goes_to_an_inbox_or_nowhere(rig: Rig, client: NatsClient) -> None:
    await client.publish(CHAT, json.dumps({"messages": HI}).encode(), reply="busway.v1.admin.w.drain")
    await ask(client, CHAT, {"messages": HI})
    assert len(rig.peer.attempts) == 1


async def test_an_unknown_model_has_no_responder(rig: Rig, client: NatsClient) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request("busway.v1.openai.chat.nope", b"{}", timeout=2)


async def test_requests_run_side_by_side(rig: Rig, client: NatsClient) -> None:
    together = asyncio.Event()

    async def wait_for_all(attempt: Attempt) -> None:
        if len(rig.peer.attempts) == 8:
            together.set()
        await together.wait()
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]), attempt.finished_frame("length"))

    rig.peer.script = wait_for_all
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(client, CHAT, {"messages": HI, "max_tokens": 1})) for _ in range(8)]
    assert all(task.result()["choices"][0]["finish_reason"] == "length" for task in asked)


async def test_more_than_it_may_answer_at_once_is_openais_429(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.bus_front.MAX_CALLS", 2)
    has_room = asyncio.Event()

    async def hold(attempt: Attempt) -> None:
        await has_room.wait()
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]), attempt.finished_frame("length"))

    async with in_task_of_its_own(lambda: open_rig(nats_server, "crowded")) as rig:
        await wait_served(rig)
        rig.peer.script = hold
        client = await nats.connect(nats_server.internal_url)
        subject = CHAT.replace("busway.", "crowded.")
        async with asyncio.TaskGroup() as tasks:
            taken = [tasks.create_task(ask(client, subject, {"messages": HI, "max_tokens": 1})) for _ in range(2)]
            await wait_until(lambda: len(rig.peer.attempts) == 2)
            error = (await ask(client, subject, {"messages": HI}))["error"]
            assert (error["status"], error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
            has_room.set()
        assert all(task.result()["choices"][0]["finish_reason"] == "length" for task in taken)
        await client.close()


async def test_a_request_that_wants_no_answer_generates_nothing(rig: Rig, client: NatsClient) -> None:
    await client.publish(CHAT, json.dumps({"messages": HI}).encode())
    await ask(client, CHAT, {"messages": HI})
    assert len(rig.peer.attempts) == 1


async def test_headers_of_a_nats_message_are_taken_as_over_http(rig: Rig, client: NatsClient) -> None:
    """Whatever their case: NATS keeps it."""
    headers = {"Traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "X-Request-ID": "by bus", "x-busway-timings": "1"}
    message = await client.request(CHAT, json.dumps({"messages": HI}).encode(), timeout=5, headers=headers)
    told = json.loads(message.data)["busway"]
    assert told["trace_id"] == "ab" * 16
    assert rig.peer.last.request["traceparent"].startswith(f"00-{'ab' * 16}-")
    assert rig.peer.last.request["request_id"] == told["request_id"] != "by bus"
    refused = await client.request(CHAT, b"{}", timeout=5, headers={"X-Request-Id": "x" * 200})
    assert json.loads(refused.data)["error"]["param"] == "X-Request-Id"
