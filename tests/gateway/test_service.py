"""The gateway as a process: ready, draining, discovered, measured."""

import asyncio
import json
from typing import Any

import msgspec
import nats
import pytest

from bus.discovery import register
from bus.server import NatsServer
from schemas.message import encode
from schemas.worker import LoadReport
from services.config import GatewayConfig
from tests.conftest import frozen, wait_until
from tests.gateway.conftest import MODEL, Rig, open_rig, runtime_config, wait_for, wait_served
from tests.gateway.peer import DECODE, PREFILL, Attempt

pytestmark = pytest.mark.usefixtures("no_leaks")


async def ready(rig: Rig) -> tuple[int, dict[str, Any]]:
    status, text = await rig.get("/ready")
    models = json.loads(text)["models"]
    return status, models[0] if models else {}


async def wait_ready(rig: Rig, **wanted: Any) -> dict[str, Any]:
    """Return the model's path once it shows these values."""
    _, path = await wait_for(
        lambda: ready(rig), lambda found: bool(found[1]) and {name: found[1][name] for name in wanted} == wanted
    )
    result: dict[str, Any] = path
    return result


async def test_ready_says_what_is_missing_and_chat_says_503(nats_server: NatsServer) -> None:
    strict_decode = runtime_config(DECODE, "decode", is_strict=True)
    async with open_rig(nats_server, "missing", workers=(strict_decode,)) as rig:
        assert (await rig.get("/live"))[0] == 200
        path = await wait_ready(rig, decode=1, routers=1)
        assert path["strict"]
        assert path["missing"] == "decode serves strictly and no prefill worker is ready"
        assert (await ready(rig))[0] == 503
        status, answer = await rig.chat()
        assert status == 503
        assert answer["error"]["code"] == "unavailable"
        assert "no prefill worker is ready" in answer["error"]["message"]
        assert json.loads((await rig.get("/v1/models"))[1])["data"] == []
        async with register(rig.fleet_bus, runtime_config(PREFILL, "prefill"), lambda: (0, False)):
            path = await wait_ready(rig, prefill=1)
            assert path["serves"] == "disaggregated"
            assert (await rig.chat())[0] == 200
        await wait_ready(rig, prefill=0)
        assert (await rig.chat())[0] == 503


async def test_ready_ends_with_the_bus_and_comes_back_with_it() -> None:
    async with NatsServer() as server, open_rig(server, "outage") as rig:
        await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 200)
        async with frozen(server.pid):
            _, text = await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 503)
            assert (json.loads(text)["nats"], json.loads(text)["models"][0]["missing"]) == ("no answer", "")
        await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 200)
        server.kill()
        await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 503)
        await server.start()
        await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 200)
        assert (await rig.get("/live"))[0] == 200


async def test_ready_means_every_model_but_those_on_their_way_out(nats_server: NatsServer) -> None:
    half = runtime_config("half", "prefill", model="half")
    async with open_rig(nats_server, "every", workers=(runtime_config("w", "both"),)) as rig:
        await wait_served(rig)
        async with register(rig.fleet_bus, half, lambda: (0, False)) as place:
            await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 503)
            lacks = {it["model"]: it["missing"] for it in json.loads((await rig.get("/ready"))[1])["models"]}
            assert lacks == {MODEL: "", "half": "no decode worker is ready"}
            assert (await rig.chat())[0] == 200
            await place.update(msgspec.structs.replace(half, state="draining"))
            await wait_served(rig)


async def test_decode_serves_aggregated_when_prefill_has_gone(nats_server: NatsServer) -> None:
    async with open_rig(nats_server, "alone", workers=(runtime_config(DECODE, "decode"),)) as rig:
        path = await wait_ready(rig, decode=1, routers=1)
        assert path["serves"] == "aggregated"
        assert (await rig.chat())[0] == 200


async def test_a_model_that_left_is_unavailable_and_one_that_never_was_is_not_found(nats_server: NatsServer) -> None:
    async with open_rig(nats_server, "left", workers=()) as rig:
        assert (await rig.chat())[0] == 404
        async with register(rig.fleet_bus, runtime_config("w", "both"), lambda: (0, False)):
            await wait_ready(rig, both=1, routers=1)
            assert (await rig.chat())[0] == 200
        await wait_for(rig.chat, lambda answer: answer[0] == 503)


async def test_draining_ends_what_runs_and_refuses_what_comes(nats_server: NatsServer) -> None:
    go_on = asyncio.Event()

    async def hold(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        await go_on.wait()
        await attempt.frames(attempt.tokens_frame([71]), attempt.finished_frame("length"))

    async with open_rig(nats_server, "drain") as rig:
        await wait_served(rig)
        rig.peer.script = hold
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with rig.http.post(rig.url + "/v1/chat/completions", json=body) as response:
            await rig.get("/live")  # leaves a connection that is kept alive
            rig.stop.set()
            await wait_until(lambda: not rig.is_listening())
            status, answer = await rig.chat()
            assert (status, answer["error"]["message"]) == (503, "the gateway is shutting down")
            go_on.set()
            assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_what_outlasts_the_drain_ends_with_an_error(nats_server: NatsServer) -> None:
    async def hold(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.tokens_frame([70]))
        await attempt.is_aborted.wait()

    async with open_rig(nats_server, "outlast", config=GatewayConfig(port=0, drain_s=0.1)) as rig:
        await wait_served(rig)
        rig.peer.script = hold
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with rig.http.post(rig.url + "/v1/chat/completions", json=body) as response:
            rig.stop.set()
            text = await response.text()
        assert "shutting down" in text
        assert "[DONE]" not in text
        async with asyncio.timeout(1.0):
            await rig.peer.last.is_aborted.wait()


async def test_load_reports_become_metrics(nats_server: NatsServer) -> None:
    async with open_rig(nats_server, "loads") as rig:
        await wait_served(rig)
        report = LoadReport(
            worker_id=runtime_config(DECODE, "decode").worker_id,
            epoch=runtime_config(DECODE, "decode").epoch,
            running=2,
            waiting=1,
            kv_blocks_used=7,
            kv_blocks_cached=3,
            kv_blocks_total=1000,
            kv_transfer_bytes={"nixl": 4096},
            num_remote_prefills=5,
            num_recomputed_tokens=6,
        )
        await rig.fleet_bus.publish(rig.fleet_bus.subjects.load(MODEL, "junk"), b"{")
        await rig.fleet_bus.publish(rig.fleet_bus.subjects.load(MODEL, DECODE), encode(report))
        await wait_for(lambda: rig.metric("busway_remote_prefills_total", worker=DECODE), lambda value: value == 5)
        labels = {"transport": "nixl", "worker": DECODE, "model": MODEL}
        assert await rig.metric("busway_kv_transfer_bytes_total", **labels) == 4096
        assert await rig.metric("busway_decode_recomputed_tokens_total", worker=DECODE) == 6
        assert await rig.metric("busway_kv_blocks_used", worker=DECODE) == 7
        assert await rig.metric("busway_kv_blocks_total", worker=DECODE) == 1000
        assert await rig.metric("busway_workers", model=MODEL, role="prefill", state="ready") == 1
        assert await rig.metric("busway_routers") == 1


async def test_the_gateway_is_in_the_fleet_with_its_url_and_answers_nats_micro(nats_server: NatsServer) -> None:
    async with open_rig(nats_server, "known", config=GatewayConfig(port=0, id="gw-1")) as rig:
        client = await nats.connect(nats_server.internal_url)
        reply = await client.request("$SRV.PING.busway-gateway", b"", timeout=2)
        assert json.loads(reply.data)["name"] == "busway-gateway"
        bucket = await client.jetstream().key_value("known_runtime")
        record = json.loads((await bucket.get("_.gateway.gw-1")).value or b"")
        assert (record["url"], record["state"]) == (rig.url, "ready")
        await client.close()


async def test_a_model_appears_and_leaves_on_nats_too(nats_server: NatsServer) -> None:
    async with open_rig(nats_server, "coming", workers=()) as rig:
        client = await nats.connect(nats_server.internal_url)
        subject = rig.fleet_bus.subjects.openai("completions", MODEL)

        async def ask() -> Any:
            try:
                return json.loads((await client.request(subject, b'{"prompt": "x"}', timeout=2)).data)
            except nats.errors.NoRespondersError:
                return None

        assert await ask() is None
        async with register(rig.fleet_bus, runtime_config("w", "both"), lambda: (0, False)):
            await wait_ready(rig, both=1, routers=1)
            assert (await wait_for(ask, lambda answer: answer is not None))["object"] == "text_completion"
        await wait_for(ask, lambda answer: answer is None)
        await client.close()


async def test_a_nats_outage_is_a_503_and_ends_by_itself() -> None:
    async with NatsServer() as server, open_rig(server, "outage") as rig:
        await wait_served(rig)
        server.kill()
        status, answer = await rig.chat()
        assert status == 503, answer
        assert answer["error"]["code"] in ("bus_unavailable", "ack_timeout")
        await server.start()
        await wait_for(rig.chat, lambda answer: answer[0] == 200, 10.0)
