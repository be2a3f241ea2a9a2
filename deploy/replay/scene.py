"""What is replayed on: how many workers of which size and speed, and how late the router hears of them."""

import msgspec

from deploy.replay.engine_model import StepTimes
from deploy.replay.router_side import RouterSettings
from deploy.replay.timing import DynamoTiming
from schemas.ids import Epoch, WorkerId
from schemas.worker import PrefillCost, Role, RuntimeConfig


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's defaults (aisimulate/crates/engine/src/config.rs@0894f5c6)."""

    num_blocks: int = 16384
    block_size: int = 64
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows comes this late. `bus_s`: any message (a hop over a nats-server on the same network is
    0.1-0.3 ms and an event loop's turn as much again; 1 ms is on the safe side). `coalesce_s`: a load report waits so
    long for more news (services/worker/load.py)."""

    bus_s: float = 0.001
    coalesce_s: float = 0.005


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet. `timing` says which: Dynamo's simulated engine, or ours at measured speed. `kv_bytes_per_token` and
    `gb_per_s` make a transfer take time; 0: none, as in Dynamo's replay."""

    num_prefill: int
    num_decode: int
    router: RouterSettings = RouterSettings()
    size: EngineSize = EngineSize()
    timing: DynamoTiming | StepTimes = DynamoTiming()
    delays: Delays = Delays()
    kv_bytes_per_token: int = 0
    gb_per_s: float = 0.0

    def handoff_s(self, bus_s: float) -> float:
        """Return the seconds of the two hops more that a handoff takes here: Dynamo's replay has none."""
        return 0.0 if isinstance(self.timing, DynamoTiming) else 2 * bus_s

    def transfer_cost(self) -> PrefillCost | None:
        """Return what decode workers here would measure of their fetches."""
        return PrefillCost(num_passes=1, token_s=self.transfer_s(1)) if self.gb_per_s else None

    def transfer_s(self, num_tokens: int) -> float:
        """Return the seconds to move the KV of so many tokens."""
        return num_tokens * self.kv_bytes_per_token / (self.gb_per_s * 1e9) if self.gb_per_s else 0.0


def config_of(size: EngineSize, role: Role, number: int) -> RuntimeConfig:
    """Return what a modelled worker would say of itself."""
    return RuntimeConfig(
        worker_id=WorkerId(f"{role}-{number}"),
        epoch=Epoch(1),
        model="replay",
        model_digest="replay",
        role=role,
        backend="replay",
        state="ready",
        handoff="after_prefill",
        compat="replay",
        block_size=size.block_size,
        total_kv_blocks=size.num_blocks,
        max_num_seqs=size.max_num_seqs,
        max_batched_tokens=size.max_batched_tokens,
        max_context_tokens=1 << 30,
        has_kv_events=True,
    )
