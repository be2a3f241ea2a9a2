"""Records and requests for the tests of the bus."""

from typing import Any

import msgspec

from schemas.ids import AttemptId, Epoch, RequestId, WorkerId, new_attempt_id
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import RuntimeConfig

_WORKER = RuntimeConfig(
    worker_id=WorkerId("w1"),
    epoch=Epoch(1),
    model="m",
    model_digest="d",
    role="prefill",
    backend="sim",
    state="ready",
    handoff="after_prefill",
    compat="c",
    block_size=16,
    total_kv_blocks=100,
    max_num_seqs=8,
    max_batched_tokens=512,
    max_context_tokens=4096,
)


def worker_record(worker_id: str = "w1", epoch: int = 1, **changes: Any) -> RuntimeConfig:
    return msgspec.structs.replace(_WORKER, worker_id=WorkerId(worker_id), epoch=Epoch(epoch), **changes)


def a_request(attempt_id: AttemptId | None = None, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId("r"),
        attempt_id=attempt_id or new_attempt_id(),
        model="m",
        token_ids=(1, 2, 3),
        sampling=Sampling(seed=1),
        stop=StopConditions(max_tokens=8),
        stream=StreamAddress(subject="_INBOX.busway.c1.tok.s"),
    )
    return msgspec.structs.replace(request, **changes)
