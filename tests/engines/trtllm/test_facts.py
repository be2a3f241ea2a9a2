"""What a worker is told of a TensorRT-LLM engine: its profile and its load."""

import pytest

from schemas.errors import EngineError
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
    args = {"enable_iter_perf_stats": "true"}
    async with seated(Scene(), "both", knows_capacity=False, engine_args=args) as seat:
        assert (seat.host.profile.block_size, seat.host.profile.total_kv_blocks) == (4, 256)
    with pytest.raises(EngineError, match="enable_iter_perf_stats"):
        async with seated(Scene(), "both", knows_capacity=False):
            pass


async def test_the_load_is_known_at_once_and_corrected_by_the_engines_statistics():
    args = {"enable_iter_perf_stats": "true", "max_batch_size": "2"}
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


async def test_an_unset_transfer_timeout_is_warned_of(caplog):
    args = {"cache_transceiver_config": '{"backend": "NIXL"}'}
    async with seated(Scene(), "p", engine_args=args):
        assert "kv_transfer_timeout_ms" in caplog.text
