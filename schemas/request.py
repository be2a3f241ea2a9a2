"""The token-level request: what the gateway, or any NATS client, publishes on `requests.{model}`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.ids import AttemptId, RequestId, WorkerId
from schemas.message import Message

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
MAX_LOGPROBS = 20
MAX_SESSION_CHARS = 256
MAX_REQUEST_ID_CHARS = 128


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and min_p 0 are off.

    `seed` is always set (the gateway draws one when the user gave none): with it, the noise of each token is a pure
    function of (seed, position in the sequence), so that a request is reproducible under batching and on resume.
    """

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    is_user_seeded: bool = False


class StopConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When the completion ends. Stop strings are the gateway's: engines see only ids.

    A stop id or EOS ends the completion, is counted in completion_tokens, and is delivered as the last id.
    Neither is sampled (their logits are -inf) before min_tokens have been generated.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False


class StreamAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where frames go. `subject` lies under the sender's inbox; `owner` is the id whose heartbeat keeps the request
    alive ("" when the sender has none: a bare NATS client)."""

    subject: Annotated[str, Meta(min_length=1, max_length=256)]
    owner: str = ""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Absolute Unix times in seconds by which a phase must be over (None: no limit); inter_token_s is a duration."""

    queue: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    first_token: float | None = None
    total: float | None = None
    inter_token_s: float | None = None


class GenerateRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="generate_request.v1"):
    """One completion of one prompt (n is fanned out before this).

    `num_logprobs`: None for none, 0 for the chosen token's only, k for the k best beside it.
    `resume`: ids of the completion already delivered; they count toward max_tokens and are not sent again.
    `cache_salt`: requests share cached KV only with the same salt. `session`: requests of one session (and salt) go to
    one worker where that costs little. `priority`: the highest number first; routers set a limit.
    `model_digest`: whose ids these are; only workers of that digest (RuntimeConfig) get them. "": any of the model's.
    `avoid`: workers that failed an earlier attempt of this request; others are preferred.
    `request_id` is the sender's name for it, in logs only. `traceparent`: W3C trace context of the caller.
    """

    request_id: Annotated[RequestId, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
    attempt_id: AttemptId
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    sampling: Sampling
    stop: StopConditions
    stream: StreamAddress
    deadlines: Deadlines = Deadlines()
    num_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    model_digest: Annotated[str, Meta(max_length=256)] = ""
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    resume: tuple[TokenId, ...] = ()
    avoid: tuple[WorkerId, ...] = ()
    traceparent: str = ""
