"""A client of nothing but nats-py and JSON, with the rights of a client: the token-level API is the bus itself."""

import asyncio
import json
import secrets
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from bus.server import NatsServer
from schemas.hop import Abort, AcceptedHop
from schemas.message import encode
from services.config import HandoffMode
from tests.flow.stack import a_request, stack

SUBJECT = "busway.v1.requests.sim"
HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]


class BareClient:
    """What any client in any language does: subscribe under its inbox, request, read arrays."""

    def __init__(self, connection: NatsClient, inbox: str) -> None:
        self.connection = connection
        self.inbox = inbox
        self.frames: list[Any] = []
        self.num_messages = 0
        self._has_news = asyncio.Event()

    async def on_message(self, msg: Msg) -> None:
        self.num_messages += 1
        self.frames += json.loads(msg.data)
        self._has_news.set()

    def request(self, **fields: Any) -> dict[str, Any]:
        return {
            "type": "generate_request.v1",
            "request_id": "mine",
            "attempt_id": secrets.token_urlsafe(16),
            "model": "sim",
            "token_ids": [5, 6, 7],
            "sampling": {"seed": 1, "temperature": 0.0},
            "stop": {"max_tokens": 6},
            "stream": {"subject": f"{self.inbox}.tok.s", "owner": ""},
        } | fields

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        msg = await self.connection.request(SUBJECT, json.dumps(request).encode(), timeout=2)
        answer: dict[str, Any] = json.loads(msg.data)
        return answer

    async def until_end(self, attempt: str) -> list[Any]:
        async with asyncio.timeout(5):
            while True:
                mine = [frame for frame in self.frames if frame[1] == attempt]
                if mine and any(frame[0] in "fe" for frame in mine):
                    return mine
                self._has_news.clear()
                await self._has_news.wait()


async def bare(server: NatsServer) -> BareClient:
    inbox = f"_INBOX.bare{secrets.token_hex(4)}"
    client = BareClient(await nats.connect(server.client_url, inbox_prefix=inbox), inbox)
    await client.connection.subscribe(f"{inbox}.tok.>", cb=client.on_message)
    await client.connection.flush()
    return client


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_frames_come_in_order_with_one_end(server: NatsServer, handoff: HandoffMode) -> None:
    async with stack(server, "p1", "d1", handoff=handoff, namespace="busway") as here:
        client = await bare(server)
        request = client.request()
        ack = await client.ask(request)
        assert (ack["type"], ack["by"]) == ("accepted.v1", "r0")
        frames = await client.until_end(request["attempt_id"])
        assert [frame[0] for frame in frames if frame[0] != "t"] == ["a", "p", "d", "b", "f"]
        tokens = [frame for frame in frames if frame[0] == "t"]
        ids = [token for frame in tokens for token in frame[3]]
        assert ids == (await here.generate([5, 6, 7], 6)).ids
        assert [frame[2] for frame in tokens] == [sum(len(one[3]) for one in tokens[:at]) for at in range(len(tokens))]
        assert frames[-1][2:5] == [6, "length", {"prompt_tokens": 3, "completion_tokens": 6}]
        await client.connection.close()


async def test_what_a_client_may_not_do_is_answered_with_why(server: NatsServer) -> None:
    async with stack(server, "b1", namespace="busway"):
        client = await bare(server)
        for wrong, word in (
            ({"stream": {"subject": "busway.v1.admin.b1.drain", "owner": ""}}, "inbox"),
            ({"stream": {"subject": "_INBOX.other.tok.s", "owner": ""}}, "inbox"),
            ({"token_ids": []}, "token_ids"),
            ({"token_ids": ["a"]}, "token_ids"),
            ({"sampling": {"seed": 1, "temperature": 9}}, "temperature"),
            ({"model": "other"}, "model"),
            ({"type": "generate_request.v9"}, "type"),
            ({"attempt_id": ""}, "attempt_id"),
            ({"attempt_id": "a" * 21 + "*"}, "attempt_id"),
            ({"attempt_id": "a" * 100_000}, "attempt_id"),
        ):
            answer = await client.ask(client.request(**wrong))  # type: ignore[arg-type]
            assert (answer["type"], answer["code"]) == ("error.v1", "invalid_request"), wrong
            assert word in answer["message"]
        assert client.frames == []
        await client.connection.close()


async def test_a_request_sent_twice_is_generated_once(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", namespace="busway") as here:
        client = await bare(server)
        request = client.request()
        for _ in range(3):
            assert (await client.ask(request))["type"] == "accepted.v1"
        frames = await client.until_end(request["attempt_id"])
        assert (await client.ask(request))["type"] == "accepted.v1"
        assert (await here.generate([5, 6, 7], 6)).ids == [
            token for frame in frames if frame[0] == "t" for token in frame[3]
        ]
        assert [frame[0] for frame in client.frames].count("f") == 1
        assert here["d1"].load().num_remote_prefills == 2
        await client.connection.close()


async def test_a_bare_client_aborts_by_the_names_in_its_frames(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", engine_args={"decode_ms_per_step": "5"}) as here:
        got: list[bytes] = []
        await here.bus.listen(f"{here.bus.inbox}.raw.s", lambda subject, payload: got.append(payload))
        request = a_request(here, [5, 6, 7], 5000)
        ack = await here.bus.ask(here.bus.subjects.requests("sim"), request, AcceptedHop)
        await here.until(lambda: any(b'["t"' in payload for payload in got))
        abort = Abort(attempt_id=request.attempt_id, reason="enough")
        await here.bus.publish(here.bus.subjects.router(ack.by, "abort"), encode(abort))
        await here.all_free()
        num_got = len(got)
        await here.generate([8, 9], 5)
        assert len(got) == num_got
