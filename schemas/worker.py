"""What discovery and load reports say of a service."""

from typing import Literal

import msgspec

from schemas.handoff import BootstrapEndpoint, Handoff
from schemas.ids import Epoch, WorkerId
from schemas.message import Message

Role = Literal["prefill", "decode", "both"]
State = Literal["starting", "ready", "draining"]


class RuntimeConfig(Message, frozen=True, kw_only=True, omit_defaults=True, tag="runtime_config.v1"):
    """What a worker is: the value of its discovery record. Never carries transfer metadata (who holds it can write
    the worker's memory).

    `epoch` is new at each start: Unix time in nanoseconds. `compat` is the digest that prefill and decode must share
    (backend, model digest, KV layout, what moves the KV). `total_kv_blocks` x `block_size` is the KV capacity, tokens.
    `revision` counts changes within an epoch. With more than `max_waiting` requests waiting the worker answers
    `busy` (0: it doesn't say). `can_resume_exactly`: a completion begun elsewhere (or here) goes on with the very same
    tokens, because noise is positional and arithmetic is deterministic. `has_kv_events`: it tells what its prefix
    cache gains and loses (schemas.kv_events). `metrics_url` is where its engine's own series are scraped.
    """

    worker_id: WorkerId
    epoch: Epoch
    model: str
    model_digest: str
    role: Role
    backend: str
    state: State
    handoff: Handoff
    compat: str
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    max_waiting: int = 0
    kv_layout: str = ""
    kv_dtype: str = ""
    kv_transport: str = ""
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    engine_version: str = ""
    bootstrap: BootstrapEndpoint | None = None
    is_strict: bool = False
    can_resume_exactly: bool = False
    has_kv_events: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    host: str = ""
    pid: int = 0
    metrics_url: str = ""

    @property
    def longest_sequence_tokens(self) -> int:
        """Prompt and completion together that this worker can hold at most."""
        return min(self.max_context_tokens, self.block_size * self.total_kv_blocks)


class ServiceRecord(Message, frozen=True, kw_only=True, omit_defaults=True, tag="service_record.v1"):
    """What a router or gateway is: the value of its discovery record. `url` is a gateway's HTTP address; `is_strict`
    a router's: it serves nothing aggregated on decode workers."""

    service: Literal["router", "gateway"]
    id: str
    epoch: Epoch
    state: State
    host: str = ""
    pid: int = 0
    url: str = ""
    is_strict: bool = False


Record = RuntimeConfig | ServiceRecord


class Heartbeat(Message, frozen=True, kw_only=True, omit_defaults=True, tag="heartbeat.v1"):
    """A life sign, twice a second. `progress` grows with every engine step; `is_busy` without progress is not ready.
    `is_leaving`: the last beat of an orderly exit."""

    id: str
    epoch: Epoch
    progress: int = 0
    is_busy: bool = False
    is_leaving: bool = False


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a worker's prefill pass of n prompt tokens: base_s + token_s * n + token2_s * n^2, as measured over
    `num_passes` of them, the largest of `max_tokens` (0: not told). Beyond that the formula is a guess."""

    num_passes: int = 0
    max_tokens: int = 0
    base_s: float = 0.0
    token_s: float = 0.0
    token2_s: float = 0.0


class LoadReport(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load_report.v1"):
    """A worker's load. Blocks used are referenced or leased ones; cached ones are free to take and counted apart.
    `dispatched` holds, for each router epoch, the highest dispatch number this report has counted.
    `queued_prefill_tokens` includes the `pass_tokens` of the prefill pass under way, which began `pass_age_s` ago.
    `prefill_cost` is None until the worker has measured a pass; `transfer_cost`, of the same form, says how long it
    takes to fetch n tokens' KV from a prefill worker after their prefill (`num_passes`: fetches). `last_kv_event` is
    the id of the last change of its prefix cache that it has published.
    The counters are totals since the epoch began."""

    worker_id: WorkerId
    epoch: Epoch
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    kv_blocks_quarantined: int = 0
    queued_prefill_tokens: int = 0
    pass_tokens: int = 0
    pass_age_s: float = 0.0
    prefill_cost: PrefillCost | None = None
    transfer_cost: PrefillCost | None = None
    last_kv_event: int = 0
    dispatched: dict[str, int] = msgspec.field(default_factory=dict)
    kv_transfer_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    num_remote_prefills: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
