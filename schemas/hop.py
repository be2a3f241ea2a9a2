"""The hops between router, workers and request owners: each is asked and acked within a second."""

from schemas.errors import ErrorRecord, Phase
from schemas.frames import FinishReason, Timings, TokenLogprobs
from schemas.handoff import BootstrapInfo, DisaggregatedParams
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.request import GenerateRequest
from schemas.worker import Role


class Dispatch(Message, frozen=True, kw_only=True, tag="dispatch.v1"):
    """Which router sent a leg, and its how-manieth: load reports echo the highest number seen of each epoch."""

    router: str
    epoch: Epoch
    number: int


class PrefillRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill_request.v1"):
    """Compute a prompt's KV. `result_subject` gets one PrefillResult when the handoff is after prefill or when the
    leg fails. `room`: the rendezvous this prefill must serve; `decode_worker`: the peer of that rendezvous, if known.
    `worker_epoch` is the chosen worker's (None: any of a queue group): an earlier process under its id, woken up or
    reconnected after it was replaced, hears the leg as well and lets it pass.
    """

    request: GenerateRequest
    dispatch: Dispatch
    result_subject: str
    bootstrap: BootstrapInfo | None = None
    decode_worker: WorkerId | None = None
    worker_epoch: Epoch | None = None


class DecodeRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="decode_request.v1"):
    """Obtain the KV by `params` and generate; without params compute the prompt here (aggregated). `prefill_timings`
    is what the attempt has cost so far, routing included; `worker_epoch` as in PrefillRequest."""

    request: GenerateRequest
    dispatch: Dispatch
    params: DisaggregatedParams | None = None
    prefill_worker: WorkerId | None = None
    prefill_timings: Timings = Timings()
    worker_epoch: Epoch | None = None


class PrefillDone(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill_done.v1"):
    """The prompt's KV is ready and `params` lead to it."""

    attempt_id: AttemptId
    params: DisaggregatedParams
    timings: Timings = Timings()


class PrefillEnded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill_ended.v1"):
    """The first token ended the request (EOS, stop id or max_tokens 1): there is no decode leg, the KV is free.

    `is_delivered`: `token_id` is the last of the resumed ids, which had ended it already. (An engine may as well refuse
    such a leg, with param "resume": decode then tells the end.)
    """

    attempt_id: AttemptId
    token_id: int
    reason: FinishReason
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    timings: Timings = Timings()
    is_delivered: bool = False


class PrefillFailed(Message, frozen=True, kw_only=True, tag="prefill_failed.v1"):
    """The prefill leg has failed and everything of it is free."""

    attempt_id: AttemptId
    error: ErrorRecord


PrefillResult = PrefillDone | PrefillEnded | PrefillFailed


class AcceptedHop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="accepted.v1"):
    """The receiver holds the attempt now. `bootstrap` is set by a queue-group member that meets by rendezvous.

    `is_duplicate`: it came by another router's dispatch before, which alone goes on with it.
    """

    by: str
    epoch: Epoch
    bootstrap: BootstrapInfo | None = None
    is_duplicate: bool = False


class Busy(Message, frozen=True, kw_only=True, omit_defaults=True, tag="busy.v1"):
    """The receiver is full or leaving: try another."""

    by: str
    reason: str
    retry_after_s: float = 1.0


Ack = AcceptedHop | Busy | ErrorRecord


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort.v1"):
    """Free everything of an attempt, in whatever phase it is; idempotent, also for unknown attempts.

    With `error` the receiver ends the attempt as failed with it (a dead peer, a failed prefill); without, the
    owner gave up and wants no more frames.
    """

    attempt_id: AttemptId
    reason: str
    error: ErrorRecord | None = None
    phase: Phase | None = None


class Resend(Message, frozen=True, kw_only=True, tag="resend.v1"):
    """Send an attempt's frames again from token `from_seq` on; answered by Ack."""

    attempt_id: AttemptId
    from_seq: int


class Drain(Message, frozen=True, kw_only=True, omit_defaults=True, tag="drain.v1"):
    """Take no new work; answered by Ack once everything in flight has ended."""

    grace_s: float | None = None


class ChangeRole(Message, frozen=True, kw_only=True, omit_defaults=True, tag="change_role.v1"):
    """End what is held in the old role, then serve in this one with the same engine; answered by Ack when it does."""

    role: Role
    grace_s: float | None = None


class Ok(Message, frozen=True, kw_only=True, tag="ok.v1"):
    """Done."""
