"""The KV itself: it moves, it is what the completion is made from, and nothing else's is ever used."""

import time

import msgspec
import numpy as np
import pytest

from schemas.handoff import KvTicket, VllmKvTransferParams
from schemas.ids import new_attempt_id
from schemas.kv_events import KvSnapshot, KvSnapshotRequest
from schemas.model_card import ModelCard
from schemas.request import Deadlines
from schemas.worker import RuntimeConfig
from services.engines.protocol import EngineProfile
from services.prefix_hash import block_hashes
from services.worker.identity import compat_digest
from services.worker.peers import is_pair
from tests.conformance.cache_ear import CacheEar
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

FOREIGN = VllmKvTransferParams(kv_transfer_params=msgspec.Raw(b'{"remote_num_tokens":40}'))


async def test_decode_with_wrong_prompt_ids_and_the_real_kv_gives_the_real_completion(desk: Desk) -> None:
    """An engine that recomputes in silence passes every other test of equality. (Rendezvous: the test after this.)"""
    if desk.pair.case.handoff != "pull":
        pytest.skip("legs with different prompts never meet in a rendezvous: the test after this")
    real = prompt(70, salt=21)
    wrong = (*prompt(69, salt=22), real[-1])
    request = desk.request(real, 10)
    expected = (await desk.aggregated(request)).ids
    assert (await desk.aggregated(desk.request(wrong, 10))).ids != expected
    params = await desk.params(request)
    got = await desk.decode(msgspec.structs.replace(request, token_ids=wrong), params)
    assert got.ids == expected
    assert got.finished.usage.num_computed_prompt_tokens == 0


@pytest.mark.parametrize("num_more", [0, 20])
async def test_legs_with_different_prompts_never_meet_in_a_rendezvous(desk: Desk, num_more: int) -> None:
    if desk.pair.case.handoff != "rendezvous":
        pytest.skip("by pull the KV is what counts: the test before this")
    request = desk.request(prompt(60, salt=28 + num_more), 6)
    params = await desk.params(request)
    other = msgspec.structs.replace(request, token_ids=prompt(60 + num_more, salt=29 + num_more))
    outcome = await desk.decode_if_taken(other, params)
    assert outcome is None or outcome.ids == (await desk.aggregated(other)).ids
    await desk.abort(desk.pair.prefill.id, request.attempt_id)


async def test_the_bytes_really_move_and_decode_computes_no_prompt(desk: Desk) -> None:
    before = await desk.load(desk.pair.decode.id), await desk.load(desk.pair.prefill.id)
    got = await desk.disaggregated(desk.request(prompt(90, salt=23), 4))
    after = await desk.load(desk.pair.decode.id), await desk.load(desk.pair.prefill.id)
    moved = [sum(load.kv_transfer_bytes.values()) for load in (*before, *after)]
    assert moved[2] + moved[3] > moved[0] + moved[1]
    assert after[0].num_remote_prefills == before[0].num_remote_prefills + 1
    assert after[0].num_recomputed_tokens == before[0].num_recomputed_tokens
    assert got.finished.timings.kv_bytes > 0
    assert got.finished.usage.num_computed_prompt_tokens == 0


async def test_a_warm_prompt_is_counted_as_prefills_hit(desk: Desk) -> None:
    ids = prompt(100, salt=24)
    first = await desk.disaggregated(desk.request(ids, 3))
    again = await desk.disaggregated(desk.request(ids, 3))
    assert again.ids == first.ids
    assert first.finished.usage.cached_tokens == 0
    block = desk.pair.case.block_size
    assert again.finished.usage.cached_tokens == (len(ids) - 1) // block * block


async def test_a_handoff_used_twice_never_gives_other_text(desk: Desk) -> None:
    """In a rendezvous the second leg waits for a prefill leg of its own, which never comes, until its deadline."""
    request = desk.request(prompt(60, salt=25), 6)
    params = await desk.params(request)
    expected = (await desk.decode(request, params)).ids
    before = await desk.load(desk.pair.decode.id)
    second = msgspec.structs.replace(request, attempt_id=new_attempt_id())
    if desk.pair.case.handoff == "rendezvous":
        second = msgspec.structs.replace(second, deadlines=Deadlines(first_token=time.time() + 3.0))
    again = await desk.decode_if_taken(second, params)
    after = await desk.load(desk.pair.decode.id)
    if again is None:
        return
    assert again.ids == expected
    assert after.num_recomputed_tokens > before.num_recomputed_tokens, "the KV was no longer the request's"


async def test_the_kv_of_a_prompt_of_another_length_is_never_used(desk: Desk) -> None:
    request = desk.request(prompt(60, salt=26), 6)
    params = await desk.params(request)
    longer = msgspec.structs.replace(request, token_ids=(*request.token_ids, *prompt(20)))
    outcome = await desk.decode_if_taken(longer, params)
    assert outcome is None or outcome.ids == (await desk.aggregated(longer)).ids
    await desk.abort(desk.pair.prefill.id, request.attempt_id)


async def test_another_engines_params_are_of_no_use(desk: Desk) -> None:
    foreign = FOREIGN
    if desk.pair.case.engine == "vllm":
        foreign = KvTicket(  # type: ignore[assignment]
            attempt_id=new_attempt_id(),
            prefill_worker=desk.pair.prefill.id,
            epoch=(await desk.record(desk.pair.prefill)).epoch,
            block_ids=(1,),
            num_tokens=5,
            layout="",
            lease_s=1.0,
            first_token_id=1,
        )
    request = desk.request(prompt(40), 4)
    outcome = await desk.decode_if_taken(request, foreign)
    assert outcome is None or outcome.ids == (await desk.aggregated(request)).ids


async def test_routers_hear_what_the_prefix_cache_gains(desk: Desk) -> None:
    """On both sides, in our names, without a gap; the load counts the same blocks once nobody uses them."""
    block, ids = desk.pair.case.block_size, prompt(3 * desk.pair.case.block_size + 5, salt=27)
    wanted = set(block_hashes(ids, block, "tenant").tolist())
    workers = (desk.pair.prefill, desk.pair.decode) if desk.pair.case.caches_fetched else (desk.pair.prefill,)
    heard = [await CacheEar.at(desk.bus, desk.model, worker.id, desk.has_news) for worker in workers]
    request = desk.request(ids, 3, cache_salt="tenant")
    assert len((await desk.disaggregated(request)).ids) == 3
    for ear, worker in zip(heard, workers, strict=True):
        assert (await desk.record(worker)).has_kv_events
        await desk.until(lambda ear=ear: wanted <= ear.held)  # type: ignore[misc]
        snapshot = await desk.bus.ask(
            desk.bus.subjects.peer(worker.id, "kv_snapshot"), KvSnapshotRequest(), KvSnapshot, timeout_s=5.0
        )
        assert wanted <= set(np.frombuffer(snapshot.blocks, "<u8").tolist())
        await desk.until_free(20.0)
        assert (await desk.load(worker.id)).kv_blocks_cached >= len(wanted)


async def test_a_pair_is_matched_and_one_of_another_engine_is_not(desk: Desk) -> None:
    prefill, decode = await desk.record(desk.pair.prefill), await desk.record(desk.pair.decode)
    assert is_pair(prefill, decode)
    assert prefill.backend == desk.pair.case.backend
    assert prefill.total_kv_blocks > 0
    assert prefill.engine_version
    for backend in {"sim", "torch", "vllm", "sglang", "trtllm"} - {prefill.backend}:
        assert not is_pair(of_backend(prefill, backend), decode)


def of_backend(record: RuntimeConfig, backend: str) -> RuntimeConfig:
    """Return the record that a worker of another engine would have if all else were equal."""
    profile = EngineProfile(
        backend=backend,
        card=ModelCard(model=record.model, digest=record.model_digest, tokenizer_json=""),
        handoff=record.handoff,
        block_size=record.block_size,
        total_kv_blocks=record.total_kv_blocks,
        max_num_seqs=record.max_num_seqs,
        max_batched_tokens=record.max_batched_tokens,
        max_context_tokens=record.max_context_tokens,
        kv_layout=record.kv_layout,
        kv_dtype=record.kv_dtype,
        kv_transport=record.kv_transport,
        engine_version=record.engine_version,
    )
    own = msgspec.structs.replace(profile, backend=record.backend)
    assert compat_digest(own) == record.compat
    return msgspec.structs.replace(record, backend=backend, compat=compat_digest(profile))
