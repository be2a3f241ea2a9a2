"""Why a request went where it went: asked of a router on `router.{router_id}.explain`."""

from typing import Literal

import msgspec

from schemas.ids import AttemptId, RequestId, WorkerId
from schemas.message import Message


class Bid(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker would make of a prompt, or (decode) of its KV. `score` decides, least wins: for a prompt the
    estimated seconds to its first token; for its KV the tokens it costs; None: no room. Times in seconds."""

    worker: WorkerId
    score: float | None
    cached_tokens: int = 0
    uncached_tokens: int = 0
    queued_tokens: int = 0
    held_tokens: int = 0
    pass_rest_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


BypassReason = Literal["mostly cached", "prefill is busy", "short prompt"]
NoBypassReason = Literal["prefill is faster", "too long", "streams are running", "no room", "no estimate", "strict"]
RefusalReason = Literal["max_ttft", "first_token_deadline", "prefill_deadline", "total_deadline", "busy", "unavailable"]


class LocalPrefill(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What computing the prompt on a decode worker would mean (conditional disaggregation), and whether it was done.
    Seconds to the first token there (`local_s`) and by way of a prefill worker (`remote_s`, transfer included), and
    what the `num_streams` running there would lose together (`streams_lose_s`)."""

    is_taken: bool
    reason: BypassReason | NoBypassReason
    worker: WorkerId = WorkerId("")
    local_s: float = 0.0
    remote_s: float = 0.0
    streams_lose_s: float = 0.0
    num_streams: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request was taken by nobody; estimate and limit in seconds, where an estimate was the reason."""

    reason: RefusalReason
    message: str
    estimate_s: float = 0.0
    limit_s: float = 0.0
    retry_after_s: float = 0.0


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who got a leg and why; `bids` are the best ones, the chosen one among them, of `num_candidates`.
    `best_overlap_tokens`: the longest prefix that any candidate had. `local`: the other way that was looked at, where
    it is switched on."""

    leg: Literal["prefill", "decode"]
    worker: WorkerId
    why: str
    num_candidates: int
    bids: tuple[Bid, ...] = ()
    best_overlap_tokens: int = 0
    local: LocalPrefill | None = None


class ExplainRequest(Message, frozen=True, kw_only=True, tag="explain_request.v1"):
    """`id`: an attempt id, or the request id that its client knows; answered by Explanation."""

    id: str


class Explanation(Message, frozen=True, kw_only=True, omit_defaults=True, tag="explanation.v1"):
    """A request's choices in the order they were made; more than one for a leg: somebody was busy or silent.
    Without choices and refusal the router doesn't know the request (any more)."""

    router: str
    policy: str
    request_id: RequestId = RequestId("")
    attempt_id: AttemptId = AttemptId("")
    num_prompt_tokens: int = 0
    choices: tuple[Choice, ...] = ()
    refusal: Refusal | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.choices) or self.refusal is not None
