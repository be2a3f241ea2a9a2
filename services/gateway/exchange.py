"""One request on its way through the gateway: what the log line, the metrics and the final chunk say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from schemas.errors import RequestError
from schemas.ids import RequestId, new_request_id
from schemas.trace_context import continued, span_id, trace_id, well_formed
from services.gateway.openai_request import Endpoint
from services.gateway.phases import Phases
from services.log_context import RequestNames

MAX_LABEL_CHARS = 128
MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class Caller:
    """What came with a request beside its body. `label` is the caller's own X-Request-Id, ours by default;
    `traceparent` is this request's own span, in the trace of the caller's span `parent_id` ("": a trace of its own);
    `implied_model` is the model of a NATS subject, for bodies that name none. `fault`: headers that can't be used."""

    request_id: RequestId
    label: str
    received_at: float
    traceparent: str
    parent_id: str = ""
    wants_timings: bool = False
    wants_explanation: bool = False
    implied_model: str | None = None
    fault: RequestError | None = None

    @property
    def names(self) -> RequestNames:
        return RequestNames(self.request_id, self.traceparent)

    @property
    def trace_id(self) -> str:
        return trace_id(self.traceparent)


@dataclass(slots=True, eq=False)
class Exchange:
    """Filled in as the request gets on. `model` is the served model's name once known, `error` what went wrong in
    words, `phases` its completions'. Kept for a while after its end, so it holds nothing large."""

    endpoint: Endpoint
    caller: Caller
    model: str | None = None
    is_stream: bool = False
    wants_timings: bool = False
    wants_explanation: bool = False
    outcome: str = "ok"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    error: str = ""
    ignored_fields: tuple[str, ...] = ()
    phases: Sequence[Phases] = ()

    def note(self, num_tokens: Sequence[int], first_token_at: Sequence[float | None]) -> None:
        """Take the choices' token counts and times of their first tokens."""
        self.completion_tokens = sum(num_tokens)
        self.first_token_at = min((at for at in first_token_at if at is not None), default=None)

    def end(self) -> None:
        """All that will be said has been said."""
        self.ended_at = now = perf_counter()
        self.error, self.ignored_fields = self.error[:MAX_ERROR_CHARS], ()
        for phases in self.phases:
            phases.end(now)

    @property
    def seconds(self) -> float:
        return (perf_counter() if self.ended_at is None else self.ended_at) - self.caller.received_at

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.caller.received_at

    def line(self) -> str:
        """Return the one line that the log gets of a request."""
        ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1000:.1f}"
        label = "" if self.caller.label == self.caller.request_id else f" label={self.caller.label}"
        return (
            f"{self.endpoint} {self.outcome}{label} model={self.model or '-'} "
            f"stream={int(self.is_stream)} prompt_tokens={self.prompt_tokens} "
            f"completion_tokens={self.completion_tokens} ttft_ms={ttft} total_ms={self.seconds * 1000:.1f}"
        )


def caller_from_headers(headers: Mapping[str, str], implied_model: str | None = None) -> Caller:
    """Return the caller as headers describe it (HTTP's, or a NATS message's with names in lower case).

    A label that can't be used is the request's fault; of a trace context that isn't well-formed W3C says to begin a
    trace of one's own.
    """
    request_id = new_request_id()
    label = headers.get("x-request-id", "")
    fault = None if _is_label(label) else _no_label(label)
    caused_by = well_formed(headers.get("traceparent", ""))
    return Caller(
        request_id=request_id,
        label=label if label and fault is None else request_id,
        received_at=perf_counter(),
        traceparent=continued(caused_by, request_id),
        parent_id=span_id(caused_by),
        wants_timings=headers.get("x-busway-timings", "") in ("1", "true"),
        wants_explanation=headers.get("x-busway-explain", "") in ("1", "true"),
        implied_model=implied_model,
        fault=fault,
    )


def _is_label(text: str) -> bool:
    return len(text) <= MAX_LABEL_CHARS and text.isascii() and (not text or text.isprintable())


def _no_label(text: str) -> RequestError:
    return RequestError(
        f"X-Request-Id: up to {MAX_LABEL_CHARS} printable ASCII characters are taken, not these {len(text)}",
        param="X-Request-Id",
    )
