"""The settings of each service: frozen structs, unknown keys refused. Read from TOML, environment and flags by
deploy.settings; nothing else reads the environment."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PolicyName = Literal["round_robin", "least_loaded", "kv", "queue"]
RoleName = Literal["prefill", "decode", "both"]
EngineName = Literal["torch", "sim", "vllm", "sglang", "trtllm"]
HandoffMode = Literal["pull", "rendezvous"]
TransferName = Literal["nixl", "shm"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0)]


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach NATS. `url` may carry credentials (nats://user:password@host:port), and may be several, with commas
    between. `replicas`: of the buckets that services make, on a cluster of so many servers or more."""

    url: str = ""
    namespace: str = "busway"
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`otlp_endpoint`: where an OpenTelemetry collector takes spans (http://host:4318/v1/traces; "": none are sent)."""

    host: str = "127.0.0.1"
    port: Port = 8000
    id: str = ""
    max_body_bytes: Positive = 8 * 1024 * 1024
    max_choices: Positive = 16
    default_max_tokens: NotNegative = 0
    request_timeout_s: PositiveSeconds = 600.0
    keepalive_s: Seconds = 10.0
    drain_s: Seconds = 30.0
    otlp_endpoint: str = ""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of policy kv: `kv_index_blocks` caps each model's prefix index (32 bytes a block), `kv_temperature_s` draws
    around the best estimate, `kv_routed_ttl_s` is how long a routed prefix counts as cached on engines without events.
    `kv_local_prefill`: prompts are computed on decode workers where that is estimated faster, at most
    `kv_max_local_tokens` uncached ones, and while streams run there `kv_max_stolen_tokens`; never where strict.
    `kv_max_ttft_s`: requests whose first token is estimated later are refused (0: only those past their deadlines).

    `max_priority`: requests with a priority beyond it, up or down, are refused.
    """

    id: str = ""
    policy: PolicyName = "least_loaded"
    kv_index_blocks: Positive = 1 << 20
    kv_temperature_s: Seconds = 0.0
    kv_routed_ttl_s: Seconds = 120.0
    kv_local_prefill: bool = False
    kv_max_local_tokens: NotNegative = 1024
    kv_max_stolen_tokens: NotNegative = 128
    kv_max_ttft_s: Seconds = 0.0
    max_priority: NotNegative = 100
    is_strict: bool = False
    ack_timeout_s: PositiveSeconds = 1.0
    max_dispatch_tries: Positive = 3
    drain_s: Seconds = 30.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is the served name, `model_path` a folder ("" for the sim engine's built-in model).

    `kv_load_failure`: what decode does when the KV can't be used. `engine_args` go to the engine verbatim;
    so do `engine_words`, what follows `--` on the command line, to engines that have a command line of their own.
    `engine_python` is the Python whose packages hold the engine ("": this one, or its venv in the cache).
    `metrics_listen` is where /metrics is served, HOST:PORT with port 0 for a free one ("": nowhere).
    `max_waiting`: with so many requests waiting, further ones are answered `busy` (0: 4 x max_num_seqs + 64).
    """

    role: RoleName = "both"
    engine: EngineName = "torch"
    model: str = ""
    model_path: str = ""
    id: str = ""
    handoff: HandoffMode = "pull"
    transfer: TransferName = "nixl"
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    lease_s: PositiveSeconds = 10.0
    max_waiting: NotNegative = 0
    is_strict: bool = False
    drain_s: Seconds = 60.0
    labels: dict[str, str] = {}
    engine_args: dict[str, str] = {}
    engine_words: tuple[str, ...] = ()
    engine_python: str = ""
    metrics_listen: str = ""
