"""A load report says what legs, blocks and counters say, each in its own place."""

import msgspec

from schemas.worker import PrefillCost
from services.engines.adapter.load import BlocksLoad, LegsLoad, Totals, engine_load
from services.engines.protocol import EngineLoad

BLOCKS = BlocksLoad(used=10, cached=11, total=12, held=13)
LEGS = LegsLoad(running=1, waiting=2, queued_tokens=3)


class Leg(msgspec.Struct):
    is_decoding: bool
    num_queued: int

    def is_running(self) -> bool:
        return self.is_decoding

    def num_queued_tokens(self) -> int:
        return self.num_queued


def test_legs_run_or_wait_and_queue_what_they_have_to_compute() -> None:
    legs = {1: Leg(True, 0), 2: Leg(False, 30), 3: Leg(False, 7)}.values()
    assert LegsLoad.of(legs) == LegsLoad(running=1, waiting=2, queued_tokens=37)
    assert LegsLoad.of([]) == LegsLoad(running=0, waiting=0, queued_tokens=0)


def test_every_count_is_reported_under_its_own_name() -> None:
    totals = Totals(
        num_remote_prefills=20,
        num_recomputed_tokens=21,
        num_prompt_tokens=22,
        num_cached_tokens=23,
        num_generated_tokens=24,
        num_transfer_bytes=25,
    )
    cost = PrefillCost(num_passes=1, max_tokens=2, base_s=0.1, token_s=0.2, token2_s=0.3)
    assert engine_load(LEGS, BLOCKS, totals, transport="wire", progress=30, prefill_cost=cost) == EngineLoad(
        running=1,
        waiting=2,
        queued_prefill_tokens=3,
        num_held=13,
        kv_blocks_used=10,
        kv_blocks_cached=11,
        kv_blocks_total=12,
        kv_blocks_quarantined=0,
        progress=30,
        kv_transfer_bytes={"wire": 25},
        num_remote_prefills=20,
        num_recomputed_tokens=21,
        num_prompt_tokens=22,
        num_cached_tokens=23,
        num_generated_tokens=24,
        prefill_cost=cost,
    )


def test_a_transport_that_moved_nothing_is_not_named() -> None:
    assert engine_load(LEGS, BLOCKS, Totals(), transport="wire", progress=0).kv_transfer_bytes == {}
