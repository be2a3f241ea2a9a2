"""Spans as a collector gets them: OTLP over HTTP, read with OpenTelemetry's own protobuf."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bus.server import NatsServer
from schemas.errors import RequestError
from schemas.trace_context import span_id, trace_id
from services.config import GatewayConfig
from services.gateway.service import _exporting
from services.gateway.traces import TraceLog
from tests.conftest import wait_until
from tests.gateway.conftest import open_rig, wait_served
from tests.gateway.peer import Attempt

CAUSED_BY = f"00-{'ab' * 16}-{'cd' * 8}-01"
NOT_SAMPLED = f"00-{'ef' * 16}-{'cd' * 8}-00"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Span]]]:
    """Run a collector; yields its URL and the spans that have come."""
    spans: list[Span] = []

    async def take(request: web.Request) -> web.Response:
        body = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(span for one in body.resource_spans for scope in one.scope_spans for span in scope.spans)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", spans
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


async def test_a_request_is_a_span_with_one_for_each_phase_end_to_end(nats_server: NatsServer) -> None:
    async with collector() as (url, spans):
        config = GatewayConfig(port=0, drain_s=2.0, otlp_endpoint=url)
        async with open_rig(nats_server, "spans", config=config) as rig:
            await wait_served(rig)
            rig.says("Hello, world")
            await rig.chat()
            async with rig.http.post(
                f"{rig.url}/v1/chat/completions",
                json={"model": "org/tiny-1.0", "messages": [{"role": "user", "content": "hi"}]},
                headers={"traceparent": CAUSED_BY},
            ) as response:
                own = response.headers["traceparent"]
            await wait_until(lambda: len([one for one in spans if one.kind == Span.SPAN_KIND_SERVER]) == 2, 10.0)
        first, second = [one for one in spans if one.kind == Span.SPAN_KIND_SERVER]
        assert (second.trace_id.hex(), second.span_id.hex()) == (trace_id(own), span_id(own))
        assert second.parent_span_id.hex() == "cd" * 8
        assert first.parent_span_id == b""
        assert first.name == "chat org/tiny-1.0"
        for root in (first, second):
            phases = [one for one in spans if one.parent_span_id == root.span_id]
            assert {"gateway", "transfer", "decode"} <= {one.name for one in phases}
            assert phases[0].start_time_unix_nano == root.start_time_unix_nano
            for one, following in pairwise(phases):
                assert one.end_time_unix_nano == following.start_time_unix_nano
            assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano
            assert {one.trace_id for one in phases} == {root.trace_id}


async def test_a_failure_is_one_and_what_the_caller_doesnt_sample_is_not_sent(nats_server: NatsServer) -> None:
    async def fail(attempt: Attempt) -> None:
        await attempt.begin()
        await attempt.frames(attempt.failed_frame("invalid_request", "not this one"))

    async with collector() as (url, spans):
        config = GatewayConfig(port=0, drain_s=2.0, otlp_endpoint=url)
        async with open_rig(nats_server, "failed-spans", config=config) as rig:
            await wait_served(rig)
            rig.peer.script = fail
            headers = {"traceparent": NOT_SAMPLED}
            body = {"model": "org/tiny-1.0", "messages": [{"role": "user", "content": "hi"}]}
            status, _ = await rig.post("/v1/chat/completions", body, headers=headers)
            assert status == 400
            await rig.post("/v1/chat/completions", body)
        assert "ef" * 16 not in {one.trace_id.hex() for one in spans}
        (root,) = [one for one in spans if one.kind == Span.SPAN_KIND_SERVER]
        assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "not this one")


async def test_a_gateway_leaves_in_time_when_nobody_collects(nats_server: NatsServer) -> None:
    config = GatewayConfig(port=0, drain_s=2.0, otlp_endpoint="http://127.0.0.1:1/v1/traces")
    async with open_rig(nats_server, "no-collector", config=config) as rig:
        await wait_served(rig)
        assert (await rig.chat())[0] == 200
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 10


async def test_an_endpoint_without_the_sdk_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "services.gateway.span_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(RequestError, match=r"gateway.otlp_endpoint.*busway\[otel\]"):
        async with _exporting(TraceLog("g"), GatewayConfig(otlp_endpoint="http://127.0.0.1:1/v1/traces"), "g"):
            pass
