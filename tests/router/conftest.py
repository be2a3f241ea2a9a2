"""Builders of the router's pure inputs."""

from collections.abc import Callable

import pytest

from schemas.handoff import Handoff
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import Role, RuntimeConfig, State

MakeConfig = Callable[..., RuntimeConfig]
MakeRequest = Callable[..., GenerateRequest]


def a_config(
    worker: str,
    role: Role,
    *,
    compat: str = "c1",
    model: str = "m",
    state: State = "ready",
    handoff: Handoff = "after_prefill",
    is_strict: bool = False,
    max_waiting: int = 0,
    model_digest: str = "d1",
) -> RuntimeConfig:
    return RuntimeConfig(
        worker_id=WorkerId(worker),
        epoch=Epoch(1),
        model=model,
        model_digest=model_digest,
        role=role,
        backend="sim",
        state=state,
        handoff=handoff,
        compat=compat,
        block_size=16,
        total_kv_blocks=100,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_context_tokens=4096,
        max_waiting=max_waiting,
        is_strict=is_strict,
    )


@pytest.fixture
def make_config() -> MakeConfig:
    return a_config


def a_request(
    num_tokens: int = 3, *, resume: tuple[int, ...] = (), deadlines: Deadlines | None = None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        attempt_id=AttemptId("a" * 22),
        model="m",
        token_ids=tuple(range(num_tokens)),
        sampling=Sampling(seed=1),
        stop=StopConditions(max_tokens=8),
        stream=StreamAddress(subject="_INBOX.x.tok.s"),
        resume=resume,
        deadlines=deadlines or Deadlines(),
    )


@pytest.fixture
def make_request() -> MakeRequest:
    return a_request
