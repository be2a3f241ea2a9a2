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


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who got a leg and why; `bids` are the best ones, the chosen one among them, of `num_candidates`.
    `best_overlap_tokens`: the longest prefix that anybody had."""

    leg: Literal["prefill", "decode"]
    worker: WorkerId
    why: str
    num_candidates: int
    bids: tuple[Bid, ...] = ()
    best_overlap_tokens: int = 0


class ExplainRequest(Message, frozen=True, kw_only=True, tag="explain_request.v1"):
    """`id`: an attempt id, or the request id that its client knows; answered by Explanation."""

    id: str


class Explanation(Message, frozen=True, kw_only=True, omit_defaults=True, tag="explanation.v1"):
    """A request's choices in the order they were made; more than one for a leg: somebody was busy or silent.
    Without choices the router doesn't know the request (any more)."""

    router: str
    policy: str
    request_id: RequestId = RequestId("")
    attempt_id: AttemptId = AttemptId("")
    num_prompt_tokens: int = 0
    choices: tuple[Choice, ...] = ()
