"""Prefill vouches for the KV that decode fetches: asked before the fetch and before its tokens are delivered."""

import msgspec

from schemas.errors import AckTimeoutError, BuswayError, KvMismatchError, RequestError, WorkerLostError
from schemas.handoff import VllmKvTransferParams
from schemas.hop import DecodeRequest
from schemas.ids import AttemptId
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict
from services.engines.prompt import num_prompt_tokens
from services.engines.protocol import PeerLink

ASK_S = 1.0
MAX_ASKS = 3

Params = dict[str, object]


class Voucher:
    """Asks the prefill worker of one handoff. No answer is a bad one."""

    def __init__(self, link: PeerLink, attempt_id: AttemptId, source: VllmKvTransferParams) -> None:
        self._link = link
        self._attempt_id = attempt_id
        self._source = source

    async def is_held(self, lease_s: float) -> Verdict:
        """Return whether the KV may be fetched: it is held and nobody has used it."""
        return await self._ask(LeaseRequest(attempt_id=self._attempt_id, epoch=self._source.epoch, lease_s=lease_s))

    async def was_held(self) -> Verdict:
        """Return whether what was fetched may be used: it was held until now, or until it was fetched."""
        return await self._ask(ConfirmRequest(attempt_id=self._attempt_id, epoch=self._source.epoch))

    async def _ask(self, message: LeaseRequest | ConfirmRequest) -> Verdict:
        worker = self._source.prefill_worker
        why: BuswayError = WorkerLostError(f"prefill worker {worker} doesn't answer")
        for _ in range(MAX_ASKS):
            try:
                return await self._link.ask(worker, message, Verdict, timeout_s=ASK_S)
            except AckTimeoutError as error:
                why = error
            except BuswayError as error:
                why = error
                break
        return Verdict(is_good=False, error=why.record())


def source_of(leg: DecodeRequest) -> tuple[VllmKvTransferParams, Params] | None:
    """Return who holds the KV, and vLLM's params as they came; None when there is nothing to fetch by params.

    Raises for another engine's params, for KV of a prompt of another length, and when nobody could vouch for it.
    """
    if leg.params is None:
        return None
    if not isinstance(leg.params, VllmKvTransferParams):
        raise RequestError(f"vLLM can't use {type(leg.params).__name__}", param="params")
    params = msgspec.json.decode(leg.params.kv_transfer_params, type=Params | None)
    if params is None:
        return None
    if not leg.params.prefill_worker:
        raise RequestError("kv_transfer_params without the prefill worker they are from", param="params")
    num_tokens = num_prompt_tokens(leg.request)
    num_remote = params.get("remote_num_tokens", num_tokens)
    if num_remote != num_tokens:
        raise KvMismatchError(f"the KV is of a prompt of {num_remote} tokens, the request has {num_tokens}")
    return leg.params, params
