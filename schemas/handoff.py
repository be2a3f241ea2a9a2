"""The disaggregated params: what decode needs to obtain the KV. "Here they are" means "decode may start now".

Each backend has its own; the router carries them and never looks inside.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message

Handoff = Literal["after_prefill", "rendezvous"]

Room = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class BootstrapEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rendezvous meets. Engines that meet over the bus (torch, sim) leave host empty: the worker id is it."""

    host: str = ""
    port: Annotated[int, Meta(ge=0, lt=65536)] = 0


class BootstrapInfo(Message, frozen=True, kw_only=True, omit_defaults=True, tag="bootstrap_info.v1"):
    """Rendezvous (SGLang, torch, sim): made by the router, fresh for each attempt, the same on both legs."""

    prefill_worker: WorkerId
    epoch: Epoch
    room: Room
    endpoint: BootstrapEndpoint = BootstrapEndpoint()


class KvTicket(Message, frozen=True, kw_only=True, omit_defaults=True, tag="kv_ticket.v1"):
    """After prefill (torch, sim): the claim on leased blocks of the prefill worker's pool.

    `block_ids` hold the KV of the first `num_tokens` tokens of the sequence, in order; the last block may be part
    filled. `layout` is the digest of the KvLayout both sides must share. `lease_s` counts from the grant, by
    prefill's clock; expiry is final. `first_token_id` was sampled by prefill; its KV is not in the blocks.
    `num_cached_tokens` is prefill's prefix hit.
    """

    attempt_id: AttemptId
    prefill_worker: WorkerId
    epoch: Epoch
    block_ids: tuple[int, ...]
    num_tokens: Annotated[int, Meta(ge=1)]
    layout: str
    lease_s: float
    first_token_id: int
    first_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0


class VllmKvTransferParams(Message, frozen=True, kw_only=True, tag="kv_transfer_params.v1"):
    """vLLM: the prefill output's kv_transfer_params, whole and untouched.

    Worker and epoch say who holds the KV until it is fetched, and can vouch for it.
    """

    kv_transfer_params: msgspec.Raw
    prefill_worker: WorkerId = WorkerId("")
    epoch: Epoch = Epoch(0)


class TrtllmDisaggregatedParams(Message, frozen=True, kw_only=True, tag="trtllm_disaggregated_params.v1"):
    """TensorRT-LLM: the fields of its DisaggregatedParams with opaque_state as base64.

    The KV is of the first `num_tokens` tokens (0: it isn't said). `num_cached_tokens` is prefill's prefix hit; worker
    and epoch say who holds the KV until it is fetched.
    """

    disaggregated_params: msgspec.Raw
    num_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_worker: WorkerId = WorkerId("")
    epoch: Epoch = Epoch(0)


DisaggregatedParams = KvTicket | BootstrapInfo | VllmKvTransferParams | TrtllmDisaggregatedParams
