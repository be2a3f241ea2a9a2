"""What a worker says of itself in discovery. Pure but for the process's own name."""

import hashlib
import os
import secrets
import socket

import msgspec

from schemas.ids import Epoch, WorkerId
from schemas.worker import RuntimeConfig
from services.config import WorkerConfig
from services.engines.protocol import EngineProfile


def worker_id(config: WorkerConfig) -> WorkerId:
    """Return the configured id, or a fresh one: {host}-{role}-{6 random}."""
    return WorkerId(config.id or f"{socket.gethostname()}-{config.role}-{secrets.token_hex(3)}")


def compat_digest(profile: EngineProfile) -> str:
    """Return what prefill and decode must share: backend, weights and tokenizer, KV layout and dtype, what moves the
    KV, handoff.

    The handoff is in it because a queue group is chosen by nothing but this digest.
    """
    kv = (profile.kv_layout, profile.kv_dtype, profile.kv_transport)
    parts = (profile.backend, profile.card.digest, *kv, profile.handoff)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def max_waiting(config: WorkerConfig, profile: EngineProfile) -> int:
    """Return how many requests may wait here before more are answered `busy`."""
    return config.max_waiting or 4 * profile.max_num_seqs + 64


def runtime_config(config: WorkerConfig, profile: EngineProfile, worker: WorkerId, epoch: Epoch) -> RuntimeConfig:
    """Return the discovery record of a worker whose engine is ready."""
    return RuntimeConfig(
        worker_id=worker,
        epoch=epoch,
        model=config.model or profile.card.model,
        model_digest=profile.card.digest,
        role=config.role,
        backend=profile.backend,
        state="ready",
        handoff=profile.handoff,
        compat=compat_digest(profile),
        block_size=profile.block_size,
        total_kv_blocks=profile.total_kv_blocks,
        max_num_seqs=profile.max_num_seqs,
        max_batched_tokens=profile.max_batched_tokens,
        max_context_tokens=profile.max_context_tokens,
        max_waiting=max_waiting(config, profile),
        kv_layout=profile.kv_layout,
        kv_dtype=profile.kv_dtype,
        kv_transport=profile.kv_transport,
        tp_size=profile.tp_size,
        pp_size=profile.pp_size,
        dp_size=profile.dp_size,
        engine_version=profile.engine_version,
        bootstrap=profile.bootstrap,
        is_strict=config.is_strict or not profile.computes_prompts,
        can_resume_exactly=profile.can_resume_exactly,
        has_kv_events=profile.has_kv_events,
        labels=config.labels,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
