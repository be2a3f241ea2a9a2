"""One request on its way through the gateway: what the log line, the metrics and the final chunk say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from schemas.ids import RequestId, new_request_id
from services.gateway.openai_request import Endpoint

MAX_LABEL_CHARS = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """What came with a request beside its body. `label` is the caller's own X-Request-Id, ours by default;
    `implied_model` is the model of a NATS subject, for bodies that name none."""

    request_id: RequestId
    label: str
    received_at: float
    traceparent: str = ""
    wants_timings: bool = False
    wants_explanation: bool = False
    implied_model: str | None = None


@dataclass(slots=True)
class Exchange:
    """Filled in as the request gets on. `model` is the served model's name once known."""

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
    ignored_fields: tuple[str, ...] = ()

    def note(self, num_tokens: Sequence[int], first_token_at: Sequence[float | None]) -> None:
        """Take the choices' token counts and times of their first tokens."""
        self.completion_tokens = sum(num_tokens)
        self.first_token_at = min((at for at in first_token_at if at is not None), default=None)

    @property
    def seconds(self) -> float:
        return perf_counter() - self.caller.received_at

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.caller.received_at

    def line(self) -> str:
        """Return the one line that the log gets of a request."""
        ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1000:.1f}"
        label = "" if self.caller.label == self.caller.request_id else f" label={self.caller.label}"
        return (
            f"{self.endpoint} {self.outcome} id={self.caller.request_id}{label} model={self.model or '-'} "
            f"stream={int(self.is_stream)} prompt_tokens={self.prompt_tokens} "
            f"completion_tokens={self.completion_tokens} ttft_ms={ttft} total_ms={self.seconds * 1000:.1f}"
        )


def caller_from_headers(headers: Mapping[str, str]) -> Caller:
    """Return the caller as HTTP headers describe it; a label or trace context that isn't well-formed is dropped."""
    request_id = new_request_id()
    label = headers.get("X-Request-Id", "")
    traceparent = headers.get("traceparent", "")
    return Caller(
        request_id=request_id,
        label=label if _is_label(label) else request_id,
        received_at=perf_counter(),
        traceparent=traceparent if _is_traceparent(traceparent) else "",
        wants_timings=headers.get("X-Busway-Timings", "") in ("1", "true"),
        wants_explanation=headers.get("X-Busway-Explain", "") in ("1", "true"),
    )


def _is_label(text: str) -> bool:
    return 0 < len(text) <= MAX_LABEL_CHARS and text.isascii() and text.isprintable()


def _is_traceparent(text: str) -> bool:
    """W3C trace context: version-traceid-parentid-flags, in hexadecimal."""
    return [len(part) for part in text.split("-")] == [2, 32, 16, 2] and set(text) <= set("0123456789abcdef-")
