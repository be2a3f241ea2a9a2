"""Where a request's time went: asked of a gateway on `gateway.{gateway_id}.trace`."""

from typing import Literal

import msgspec

from schemas.ids import AttemptId, RequestId, WorkerId
from schemas.message import Message

Reached = Literal["sent", "accepted", "prefilling", "decoding", "streaming"]


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, in the order of time; they never overlap, and add up to the whole.

    `gateway_s`: until the request was sent. `retry_s`: attempts that brought no token. `queue_s`: on the bus, until a
    router had taken it. `route_s`: the router, and messages between it and prefill. `prefill_queue_s`, `prefill_s`,
    `decode_queue_s` and `transfer_s`: what the first token waited for in workers. `first_token_s`: from the KV's
    arrival until the token was here, and messages that nobody else has counted. `unreported_s`: in the hands of router
    and workers that have not told, because it ended before its first token or they were lost. `decode_s`: from the
    first token to the end."""

    gateway_s: float = 0.0
    retry_s: float = 0.0
    queue_s: float = 0.0
    route_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_queue_s: float = 0.0
    transfer_s: float = 0.0
    first_token_s: float = 0.0
    unreported_s: float = 0.0
    decode_s: float = 0.0


class AttemptTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt, from its sending (`sent_s` after the request's arrival) until the next one's, or the end.
    `reached`: how far it got. `ended_by`: the code of the error that cost it, "" for the last one."""

    attempt_id: AttemptId
    sent_s: float
    reached: Reached
    phases: PhaseSeconds
    total_s: float
    router: str = ""
    prefill_worker: WorkerId = WorkerId("")
    decode_worker: WorkerId = WorkerId("")
    ended_by: str = ""


class CompletionTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of the answer. `ttft_s` (None: no token came) is the sum of its phases but `decode_s`, `total_s` of
    all of them: from the request's arrival to the completion's last frame. `overlap_s`: transfer that ran while the
    prompt was computed, and so cost nothing."""

    index: int
    phases: PhaseSeconds
    total_s: float
    ttft_s: float | None = None
    num_tokens: int = 0
    kv_bytes: int = 0
    overlap_s: float = 0.0
    attempts: tuple[AttemptTrace, ...] = ()


class TraceRequest(Message, frozen=True, kw_only=True, tag="trace_request.v1"):
    """`id`: the answer's or the request's, its client's (X-Request-Id), its trace's, or an attempt's; answered by
    Trace."""

    id: str


class Trace(Message, frozen=True, kw_only=True, omit_defaults=True, tag="trace.v1"):
    """A recent request of a gateway; without `request_id` that one doesn't know it (any more).

    `outcome`: running, ok, aborted, or the code of `error`. `label` is the client's own id for it, `parent_id` the
    client's span. `arrived_at` is Unix seconds by the gateway's clock, `total_s` until the answer's last byte."""

    gateway: str
    request_id: RequestId = RequestId("")
    label: str = ""
    trace_id: str = ""
    parent_id: str = ""
    endpoint: str = ""
    model: str = ""
    outcome: str = ""
    error: str = ""
    is_stream: bool = False
    arrived_at: float = 0.0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    completions: tuple[CompletionTrace, ...] = ()
