"""The words of vLLM: what the adapter's parts tell one another of its engine core, without importing vLLM."""

import secrets
from typing import Literal, NamedTuple

import msgspec

from schemas.errors import BuswayError
from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId
from schemas.kv_events import KvChange

NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")

Finish = Literal["stop", "length", "abort", "error", "repetition", "poisoned"]


def fresh_core_id(attempt_id: AttemptId) -> str:
    """Return an id for one request in the engine: the attempt's and 8 random hex digits, as vLLM's own front end makes
    them. Its push connector finds the two legs of a handoff by what is left without those digits
    (get_base_request_id in nixl/utils.py@0.32.0)."""
    return f"{attempt_id}-{secrets.token_hex(4)}"


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine core: its own command-line `words`, and what busway decides for it.

    `kv_role` None: no connector unless the words name one. `side_channel_host` and `_port` are where its NIXL
    handshake listens, unless the environment says so.
    """

    model_path: str
    words: tuple[str, ...]
    kv_role: Literal["kv_producer", "kv_consumer"] | None
    kv_load_failure: Literal["recompute", "fail"]
    lease_s: float
    side_channel_host: str


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine core says of itself. `handshake` is what both sides of a transfer must share, in the
    connector's own digest ("" without one); `lease_s` the connector's; `num_blocks` leaves out vLLM's null block."""

    version: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    kv_dtype: str
    kv_bytes_per_token: int
    tp_size: int
    pp_size: int
    connector: str
    handshake: str
    lease_s: float
    has_priorities: bool
    has_kv_events: bool

    @property
    def is_nixl(self) -> bool:
        """Whether its connector is one of NIXL's: those return kv_transfer_params for every prefill."""
        return self.connector in NIXL_CONNECTORS


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine core gets it. `sampling` are SamplingParams' arguments."""

    id: str
    token_ids: list[int]
    sampling: dict[str, object]
    cache_salt: str = ""
    priority: int = 0
    kv_transfer_params: dict[str, object] | None = None
    is_unproven: bool = False


class PromptStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's KV came from, in tokens (vllm/v1/metrics/stats.py PrefillStats: the source of its counter
    vllm:prompt_tokens_by_source_total), and seconds from queued to scheduled, and from there to the first token."""

    computed: int
    local_cache: int
    external: int
    queue_s: float
    prefill_s: float


class CoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step made of one request. `error`: the engine wouldn't even take it."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    kv_transfer_params: dict[str, object] | None = None
    prompt: PromptStats | None = None
    error: BuswayError | None = None


class CoreGauges(msgspec.Struct, frozen=True, kw_only=True):
    """The core's own numbers after a step. `num_delayed`: finished requests whose blocks wait for a peer;
    `blocks_cached` are those that hold KV which nobody uses."""

    blocks_used: int = 0
    blocks_cached: int = 0
    num_delayed: int = 0


class PrefillPass(NamedTuple):
    """A step that computed so many prompt tokens and nothing else of weight."""

    num_tokens: int
    seconds: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of one step: outputs, requests whose delayed blocks became free, leases that ran out, bytes that came, and
    what the prefix cache gained and lost before all that."""

    outputs: tuple[CoreOutput, ...]
    freed: tuple[str, ...]
    num_expired: int
    num_bytes: int
    gauges: CoreGauges
    cache_changes: tuple[KvChange, ...] = ()
    prefill_pass: PrefillPass | None = None
