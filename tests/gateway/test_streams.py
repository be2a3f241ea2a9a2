"""What goes over the wire of a stream, and what a client's leaving does."""

import asyncio
import json
import socket
from time import monotonic
from typing import Any

import pytest

from schemas.trace import PhaseSeconds
from services.config import GatewayConfig
from tests.conftest import wait_until
from tests.gateway.conftest import MODEL, Rig, open_rig, wait_for, wait_served
from tests.gateway.peer import Attempt
from tests.gateway.vocabularies import IM_END

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
ABORT_LIMIT_S = 0.1


class Wire:
    """A raw HTTP connection that reads a chunked response chunk by chunk: one chunk is one write of the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, rig: Rig, body: dict[str, Any], *, receive_bytes: int = 0) -> "Wire":
        """Send a request; `receive_bytes` limits what the kernel takes in for a reader that doesn't read."""
        host, port = rig.url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock)
        payload = json.dumps({"model": MODEL, **body}).encode()
        headers = f"Host: x\r\nX-Request-Id: my-label\r\nContent-Length: {len(payload)}"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n"
        writer.write(head.encode() + payload)
        return cls(reader, writer)

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def write_of_gateway(self) -> bytes:
        """Return the next chunk of the chunked body, b"" at its end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def rest(self) -> bytes:
        parts = []
        while part := await self.write_of_gateway():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self.writer.transport.abort()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "stream": True, **fields}


async def test_a_step_is_one_write_and_the_first_has_role_and_text(rig: Rig) -> None:
    steps = [rig.tokenizer.encode(text).ids for text in ("one two", " three", " four")]
    go_on = asyncio.Event()

    async def step_by_step(attempt: Attempt) -> None:
        await attempt.begin()
        for ids in steps:
            await attempt.frames(attempt.tokens_frame(ids))
            await go_on.wait()
            go_on.clear()
        await attempt.frames(attempt.tokens_frame([IM_END]), attempt.finished_frame("stop"))

    rig.peer.script = step_by_step
    wire = await Wire.post(rig, chat())
    head = await wire.head()
    assert "content-type: text/event-stream" in head.lower()
    assert "x-request-id: my-label" in head.lower()
    for text in ("one two", " three", " four"):
        events = (await wire.write_of_gateway()).decode()
        contents = [json.loads(line[6:])["choices"][0]["delta"] for line in events.split("\n\n") if line]
        assert contents[-1] == {"content": text}
        go_on.set()
    assert (await wire.rest()).endswith(b"data: [DONE]\n\n")
    wire.close()


async def test_siblings_that_arrive_together_are_one_write(rig: Rig) -> None:
    together = asyncio.Event()

    async def speak_together(attempt: Attempt) -> None:
        await attempt.begin()
        if len(rig.peer.attempts) == 3:
            together.set()
        await together.wait()
        if attempt is rig.peer.attempts[0]:
            frames = [sibling.tokens_frame([70]) for sibling in rig.peer.attempts]
            await attempt.frames(*frames)
        await attempt.is_aborted.wait()

    rig.peer.script = speak_together
    wire = await Wire.post(rig, chat(n=3))
    await wire.head()
    events = await wire.write_of_gateway()
    assert events.count(b'"content":""') == 3
    assert events.count(b"data: ") == 6
    wire.close()


async def test_an_error_before_the_first_token_has_its_status(rig: Rig) -> None:
    async def fail(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.failed_frame("deadline_exceeded", "prefill took too long", phase="prefill"))

    rig.peer.script = fail
    wire = await Wire.post(rig, chat())
    head = await wire.head()
    assert head.startswith("HTTP/1.1 504 ")
    assert "application/json" in head
    wire.close()


async def test_a_failure_in_mid_stream_is_an_error_event_and_then_the_end(rig: Rig) -> None:
    async def fail(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        await attempt.frames(attempt.failed_frame("worker_lost", "gone"))

    rig.peer.script = fail
    wire = await Wire.post(rig, chat())
    assert (await wire.head()).startswith("HTTP/1.1 200 ")
    body = (await wire.rest()).decode()
    assert body.rstrip().split("\n\n")[-1].startswith('event: error\ndata: {"error":{"message":"gone"')
    assert '"finish_reason":"' not in body
    assert "[DONE]" not in body
    wire.close()


async def test_a_gap_in_the_frames_is_never_shown_as_success(rig: Rig) -> None:
    async def lose_one(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        attempt.tokens_frame([71])
        await attempt.frames(attempt.tokens_frame([72]))
        await attempt.is_aborted.wait()

    rig.peer.script = lose_one
    wire = await Wire.post(rig, chat())
    await wire.head()
    body = await wire.rest()
    assert b'"code":"worker_lost"' in body  # nobody answers for what is missing, on any try
    assert b"[DONE]" not in body
    wire.close()


async def hold_before_first_token(attempt: Attempt) -> None:
    await attempt.begin()
    await attempt.is_aborted.wait()


async def hold_before_any_frame(attempt: Attempt) -> None:
    await attempt.is_aborted.wait()


async def hold_in_mid_stream(attempt: Attempt) -> None:
    await attempt.begin()
    await attempt.frames(attempt.tokens_frame([70]))
    await attempt.is_aborted.wait()


@pytest.mark.parametrize("hold", [hold_before_any_frame, hold_before_first_token, hold_in_mid_stream])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_frees_its_requests_within_100_ms(
    rig: Rig, hold: Any, is_stream: bool, n: int
) -> None:
    rig.peer.script = hold
    before = await rig.metric("busway_gateway_requests_total", outcome="aborted") or 0.0
    wire = await Wire.post(rig, chat(stream=is_stream, n=n))
    await wait_until(lambda: len(rig.peer.attempts) == n)
    if is_stream and hold is hold_in_mid_stream:
        await wire.head()
    wire.close()
    left_at = monotonic()
    await wait_until(lambda: all(attempt.is_aborted.is_set() for attempt in rig.peer.attempts))
    assert max(attempt.aborted_at or 0.0 for attempt in rig.peer.attempts) - left_at < ABORT_LIMIT_S
    assert await rig.metric("busway_gateway_requests_total", outcome="aborted") == before + 1


async def test_a_quiet_stream_is_kept_alive_by_comments(nats_server: Any) -> None:
    go_on = asyncio.Event()

    async def hold(attempt: Attempt) -> None:
        await go_on.wait()
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        await attempt.frames(attempt.failed_frame("engine_failed", "too late for a status"))

    async with open_rig(nats_server, "quiet", config=GatewayConfig(port=0, keepalive_s=0.1)) as rig:
        await wait_served(rig)
        rig.peer.script = hold
        wire = await Wire.post(rig, chat())
        assert (await wire.head()).startswith("HTTP/1.1 200 ")
        assert [await wire.write_of_gateway() for _ in range(2)] == [b": keep-alive\n\n"] * 2
        whole = await Wire.post(rig, {"messages": HI})
        await wait_until(lambda: len(rig.peer.attempts) == 2)
        go_on.set()
        assert b"event: error" in await wire.rest()
        assert (await whole.head()).startswith("HTTP/1.1 500 "), "an unstreamed answer keeps its status for the end"
        wire.close()
        whole.close()


async def test_a_request_past_its_deadline_is_a_504(nats_server: Any) -> None:
    config = GatewayConfig(port=0, request_timeout_s=0.2)
    async with open_rig(nats_server, "late", config=config) as rig:
        await wait_served(rig)
        rig.peer.script = hold_before_first_token
        status, answer = await rig.chat()
        assert status == 504
        assert answer["error"]["code"] == "deadline_exceeded"
        async with asyncio.timeout(1.0):
            await rig.peer.last.is_aborted.wait()


async def test_a_reader_that_takes_nothing_holds_its_request_no_longer_than_the_deadline(nats_server: Any) -> None:
    async def pour(attempt: Attempt) -> None:
        await attempt.begin()
        while not attempt.is_aborted.is_set():
            await attempt.frames(attempt.tokens_frame([long_id] * 20_000))
            await asyncio.sleep(0.001)

    config = GatewayConfig(port=0, request_timeout_s=0.5)
    async with open_rig(nats_server, "stuck", config=config) as rig:
        await wait_served(rig)
        long_id = max(range(700), key=lambda token_id: len(rig.tokenizer.decode([token_id])))
        rig.peer.script = pour
        wire = await Wire.post(rig, chat(), receive_bytes=4096)
        await wire.head()
        wire.writer.transport.pause_reading()
        await wait_until(lambda: bool(rig.peer.attempts) and rig.peer.last.is_aborted.is_set(), 5.0)
        in_flight = lambda: rig.metric("busway_gateway_requests_in_flight", endpoint="chat")  # noqa: E731
        await wait_for(in_flight, lambda value: not value)
        wire.writer.transport.resume_reading()
        body = await wire.rest()
        assert b"no complete answer within 0.5 s" in body
        assert b"[DONE]" not in body
        wire.close()


async def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection(rig: Rig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps({"model": MODEL, **chat()}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload))
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert answer.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_timings_come_when_asked_for_and_add_up(rig: Rig) -> None:
    status, answer = await rig.chat(busway={"timings": True})
    assert status == 200
    phases = answer["busway"]
    parts = [name for name in PhaseSeconds.__struct_fields__ if name != "decode_s"]
    assert sum(phases[name] for name in parts) == pytest.approx(phases["ttft_s"], abs=1e-5)
    assert phases["ttft_s"] + phases["decode_s"] == pytest.approx(phases["total_s"], abs=1e-5)
    assert min(phases[name] for name in parts) >= 0
    assert phases["kv_bytes"] == 4096
    assert (phases["router"], phases["prefill_worker"], phases["decode_worker"]) == (
        "test-router",
        "test-prefill",
        "test-decode",
    )
    async with rig.http.post(
        rig.url + "/v1/chat/completions", json={"model": MODEL, **chat()}, headers={"X-Busway-Timings": "1"}
    ) as response:
        events = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["busway"]["prefill_worker"] == "test-prefill"


async def test_ttft_and_gaps_and_tokens_are_measured(rig: Rig) -> None:
    await rig.chat()
    assert (await rig.metric("busway_gateway_time_to_first_token_seconds_count", model=MODEL) or 0) >= 1
    assert (await rig.metric("busway_gateway_inter_token_seconds_count", model=MODEL) or 0) >= 1
    assert (await rig.metric("busway_gateway_completion_tokens_total", model=MODEL) or 0) >= 2
