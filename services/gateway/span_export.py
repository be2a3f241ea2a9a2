"""Spans of ended requests for an OpenTelemetry collector (OTLP over HTTP): one for the request, one for each of its
phases. The only home of opentelemetry, which the extra `otel` installs; its own OTEL_* variables count.

Nothing but gateways export: they know all phases, and workers need no SDK. Batches leave on a thread of the SDK's; what
its queue can't hold is dropped.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from msgspec import structs
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from schemas.trace import CompletionTrace, Trace
from schemas.trace_context import span_id

LEAVE_S = 2.0


class SpanExport:
    """Made by `span_export`; `export` returns at once."""

    def __init__(self, endpoint: str, gateway: str) -> None:
        self._ids = _Ids()
        resource = Resource.create({SERVICE_NAME: "busway-gateway", SERVICE_INSTANCE_ID: gateway})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("busway", version("busway"))

    def export(self, trace: Trace, traceparent: str) -> None:
        """Take an ended request; `traceparent` is the context of its own span, whose ids it gets. One that its caller
        doesn't sample is passed over."""
        span = self._request_span(trace, traceparent)
        if not span.is_recording():
            return
        context = api.set_span_in_context(span)
        for completion in trace.completions:
            self._phase_spans(completion, trace.arrived_at, context)
        if trace.outcome != "ok":
            span.set_status(api.Status(api.StatusCode.ERROR, trace.error or trace.outcome))
        span.end(end_time=_ns(trace.arrived_at + trace.total_s))

    async def close(self) -> None:
        """Send what has gathered, for at most LEAVE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.to_thread(self._provider.shutdown)

    def _request_span(self, trace: Trace, traceparent: str) -> api.Span:
        self._ids.preset(int(trace.trace_id, 16), int(span_id(traceparent), 16))
        return self._tracer.start_span(
            f"{trace.endpoint} {trace.model}".rstrip(),
            context=_caused_by(trace, traceparent),
            kind=api.SpanKind.SERVER,
            start_time=_ns(trace.arrived_at),
            attributes={
                "busway.request_id": trace.request_id,
                "busway.label": trace.label,
                "busway.outcome": trace.outcome,
                "gen_ai.request.model": trace.model,
                "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum(one.num_tokens for one in trace.completions),
            },
        )

    def _phase_spans(self, completion: CompletionTrace, arrived_at: float, context: Context) -> None:
        """Lay the phases end to end, as they add up."""
        at = arrived_at
        last = completion.attempts[-1] if completion.attempts else None
        who = {"router": last.router, "prefill": last.prefill_worker, "decode": last.decode_worker} if last else {}
        attributes = {f"busway.{part}": name for part, name in who.items() if name}
        for name, seconds in structs.asdict(completion.phases).items():
            if seconds:
                span = self._tracer.start_span(
                    name.removesuffix("_s").replace("_", " "),
                    context=context,
                    start_time=_ns(at),
                    attributes={"busway.choice": completion.index, **attributes},
                )
                at += seconds
                span.end(end_time=_ns(at))


class _Ids(RandomIdGenerator):
    """Gives the next span ids that went out before it began, all others random ones."""

    def __init__(self) -> None:
        self._trace_id = 0
        self._span_id = 0

    def preset(self, trace_id: int, span_id: int) -> None:
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        given, self._trace_id = self._trace_id, 0
        return given or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self._span_id = self._span_id, 0
        return given or super().generate_span_id()


@contextlib.asynccontextmanager
async def span_export(endpoint: str, gateway: str) -> AsyncIterator[SpanExport]:
    """Export to a collector (http://host:4318/v1/traces) for the length of the block."""
    export = SpanExport(endpoint, gateway)
    try:
        yield export
    finally:
        await export.close()


def _caused_by(trace: Trace, traceparent: str) -> Context:
    """Return the caller's span as a context, an empty one for a trace that begins here."""
    if not trace.parent_id:
        return Context()
    caller = api.SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.parent_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(int(traceparent[-2:], 16)),
    )
    return api.set_span_in_context(api.NonRecordingSpan(caller), Context())


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
