"""What a worker is told of a TensorRT-LLM engine: its profile and its load."""

import pytest

from schemas.errors import EngineError
from schemas.ids import new_attempt_id
from services.engines.adapter.load import Totals
from services.engines.trtllm.held import HeldKv
from services.engines.trtllm.load import STALE_AFTER_S, LoadBook
from tests.engines.paged.fleet import decode_leg, prompt, request_for
from tests.engines.trtllm.scene import TRANSCEIVER, Scene, scene_of, seated

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_the_profile_is_what_the_engine_says():
    async with scene_of(
        engine_args={
            "kv_cache_config": '{"tokens_per_block": 8, "max_blocks": 50, "dtype": "fp8"}',
            "max_batch_size": "3",
        }
    ) as scene:
        profile = scene["p"].host.profile
        assert (profile.backend, profile.handoff, profile.engine_version) == ("trtllm", "after_prefill", "1.3.0rc29")
        assert (profile.block_size, profile.total_kv_blocks, profile.max_num_seqs) == (8, 50, 3)
        assert (profile.kv_dtype, profile.max_context_tokens, profile.max_batched_tokens) == ("fp8", 400, 512)
        assert profile.kv_layout == scene["d"].host.profile.kv_layout


@pytest.mark.parametrize(
    "other", [{"kv_cache_config": '{"tokens_per_block": 8}'}, {"cache_transceiver_config": '{"backend": "UCX"}'}]
)
async def test_engines_whose_kv_cant_be_shared_differ_in_layout_and_those_of_other_tp_dont(other):
    scene = Scene()
    same = {"cache_transceiver_config": TRANSCEIVER.replace("NIXL", "DEFAULT"), "tensor_parallel_size": "4"}
    async with (
        seated(scene, "p1") as one,
        seated(scene, "p2", engine_args=other) as two,
        seated(scene, "p3", engine_args=same) as three,
    ):
        assert one.host.profile.kv_layout != two.host.profile.kv_layout
        assert one.host.profile.kv_layout == three.host.profile.kv_layout
        assert three.host.profile.tp_size == 4


async def test_the_capacity_comes_from_statistics_where_there_is_no_other_answer():
    async with seated(Scene(), "both", knows_capacity=False) as seat:
        assert (seat.host.profile.block_size, seat.host.profile.total_kv_blocks) == (4, 256)
    silent = {"enable_iter_perf_stats": "false"}
    with pytest.raises(EngineError, match="enable_iter_perf_stats"):
        async with seated(Scene(), "both", knows_capacity=False, engine_args=silent):
            pass


async def test_the_load_is_known_at_once_and_corrected_by_the_engines_statistics():
    args = {"max_batch_size": "2"}
    async with seated(Scene(), "both", engine_args=args) as seat:
        with seat.paused("context"):
            requests = [request_for(prompt(10, salt), max_tokens=30) for salt in range(3)]
            for request in requests:
                seat.engine.decode(decode_leg(request))
            load = seat.engine.load()
            assert (load.running, load.waiting, load.queued_prefill_tokens, load.kv_blocks_total) == (2, 1, 30, 256)
            progress = load.progress
            await seat.host.until(lambda: seat.engine.load().progress > progress + 3)
            assert seat.engine.load().kv_blocks_used == 9
        for request in requests:
            await seat.host.output(request.attempt_id)
        await seat.until_empty()


async def test_one_long_prompt_is_progress_all_the_while():
    """By the engine's own statistics: nothing else comes of it until its first token."""
    async with seated(Scene(), "both") as seat:
        with seat.paused("context"):
            seat.engine.decode(decode_leg(request_for(prompt(10), max_tokens=2)))
            for _ in range(3):
                progress = seat.engine.load().progress
                await seat.host.until(lambda progress=progress: seat.engine.load().progress > progress)


def test_what_an_idle_engine_said_last_is_not_believed_for_long():
    """Its last statistics may be of before it held the KV that waits."""
    held = HeldKv(60.0)
    held.hold(new_attempt_id(), 5, 10.0)
    book = LoadBook(block_size=4, total_blocks=100, max_num_seqs=8, held=held)
    book.observe({"kvCacheStats": {"usedNumBlocks": 1}}, 10.0)
    assert book.load([], Totals(), 10.0 + STALE_AFTER_S).kv_blocks_used == 1
    assert book.load([], Totals(), 10.1 + STALE_AFTER_S).kv_blocks_used == 5
    book.observe({"kvCacheStats": {"usedNumBlocks": 7}}, 20.0)
    assert book.load([], Totals(), 20.0).kv_blocks_used == 7


async def test_an_unset_transfer_timeout_is_warned_of(caplog):
    args = {"cache_transceiver_config": '{"backend": "NIXL"}'}
    async with seated(Scene(), "p", engine_args=args):
        assert "kv_transfer_timeout_ms" in caplog.text
