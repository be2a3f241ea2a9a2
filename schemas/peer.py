"""Messages between the workers of a KV handoff, on `peer.{worker_id}.{metadata,write,lease,confirm,meet,landed}`.

Only built-in engines (torch, sim) speak them; NIXL metadata travels here and nowhere else.
"""

from schemas.errors import ErrorRecord
from schemas.frames import TokenLogprobs
from schemas.handoff import KvTicket
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message


class MetadataRequest(Message, frozen=True, kw_only=True, tag="metadata_request.v1"):
    """Ask for a peer's transfer agent, and introduce the asker's own (base64, like every agent blob here)."""

    worker: WorkerId
    epoch: Epoch
    agent: "AgentMetadata"


class AgentMetadata(Message, frozen=True, kw_only=True, tag="agent_metadata.v1"):
    """A transfer agent: `blob` is what its library needs to reach it, `layout` the digest of its pool's KvLayout.
    `host_id` is equal for processes that share memory."""

    name: str
    epoch: Epoch
    transport: str
    layout: str
    host_id: str
    num_blocks: int
    blob: bytes


class WriteRequest(Message, frozen=True, kw_only=True, tag="write_request.v1"):
    """Decode asks prefill to WRITE a ticket's blocks (in order) into its own; answered by Verdict when they landed."""

    ticket: KvTicket
    decode_worker: WorkerId
    decode_epoch: Epoch
    block_ids: tuple[int, ...]
    deadline: float


class LeaseRequest(Message, frozen=True, kw_only=True, tag="lease_request.v1"):
    """Renew the lease on an attempt's blocks; answered by Verdict."""

    attempt_id: AttemptId
    epoch: Epoch
    lease_s: float


class ConfirmRequest(Message, frozen=True, kw_only=True, tag="confirm_request.v1"):
    """The bytes have arrived: was the lease held throughout? Frees the blocks; idempotent; answered by Verdict."""

    attempt_id: AttemptId
    epoch: Epoch


class Verdict(Message, frozen=True, kw_only=True, omit_defaults=True, tag="verdict.v1"):
    """KV is used only when `is_good`. `num_bytes` and `seconds` are the transfer's, where prefill made it."""

    is_good: bool
    error: ErrorRecord | None = None
    num_bytes: int = 0
    seconds: float = 0.0


class MeetRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="meet_request.v1"):
    """Rendezvous: decode hands over the blocks that shall receive the prompt's KV; answered by Verdict (good: noted).

    `block_ids` receive the prompt's blocks from number `skip_blocks` on: decode has those before in its own cache.
    `prompt_digest` must equal prefill's: legs with different prompts never meet.
    """

    attempt_id: AttemptId
    room: int
    epoch: Epoch
    decode_worker: WorkerId
    decode_epoch: Epoch
    num_tokens: int
    prompt_digest: str
    block_ids: tuple[int, ...]
    skip_blocks: int = 0
    deadline: float = 0.0


class Landed(Message, frozen=True, kw_only=True, omit_defaults=True, tag="landed.v1"):
    """Rendezvous: prefill tells decode that the last chunk's KV has landed, and the first token; answered by Ok.
    `transfer_s` is from the first write on; `last_transfer_s` only what came after the prompt was computed and
    decode's blocks were there, for which it waited `decode_wait_s`."""

    attempt_id: AttemptId
    room: int
    first_token_id: int
    first_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0


class Stranded(Message, frozen=True, kw_only=True, tag="stranded.v1"):
    """One leg of an attempt has failed or was aborted: the other frees its own and reports `error`; answered by Ok."""

    attempt_id: AttemptId
    error: ErrorRecord
