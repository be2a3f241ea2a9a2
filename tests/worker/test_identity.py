"""What prefill and decode must share, and what a worker says of itself."""

from itertools import permutations

import msgspec
import pytest

from schemas.ids import Epoch, WorkerId
from schemas.model_card import ModelCard
from services.config import WorkerConfig
from services.engines.protocol import EngineProfile
from services.worker.identity import compat_digest, runtime_config, worker_id
from services.worker.peers import is_pair

PROFILE = EngineProfile(
    backend="sim",
    card=ModelCard(model="m", digest="d1", tokenizer_json="{}"),
    handoff="after_prefill",
    block_size=16,
    total_kv_blocks=100,
    max_num_seqs=8,
    max_batched_tokens=512,
    max_context_tokens=4096,
    kv_layout="l1",
    kv_dtype="float32",
    engine_version="1",
)


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "torch"},
        {"card": ModelCard(model="m", digest="d2", tokenizer_json="{}")},
        {"kv_layout": "l2"},
        {"kv_dtype": "bfloat16"},
        {"kv_transport": "shm"},
        {"handoff": "rendezvous"},
    ],
)
def test_workers_that_differ_where_kv_would_be_wrong_are_of_other_groups(change: dict[str, object]) -> None:
    assert compat_digest(msgspec.structs.replace(PROFILE, **change)) != compat_digest(PROFILE)


@pytest.mark.parametrize(("prefill", "decode"), list(permutations(("sim", "torch", "vllm", "sglang", "trtllm"), 2)))
def test_an_engine_is_never_paired_with_one_of_another_kind_though_all_else_were_equal(
    prefill: str, decode: str
) -> None:
    """An SGLang prefill worker and a vLLM decode worker, and every other two."""
    records = [
        runtime_config(
            WorkerConfig(role=role), msgspec.structs.replace(PROFILE, backend=backend), WorkerId(backend), Epoch(1)
        )
        for role, backend in (("prefill", prefill), ("decode", decode))
    ]
    assert records[0].compat != records[1].compat
    assert not is_pair(*records)
    assert is_pair(records[0], msgspec.structs.replace(records[0], role="decode"))


def test_sizes_that_dont_matter_to_kv_dont_part_workers() -> None:
    other = msgspec.structs.replace(PROFILE, total_kv_blocks=7, max_num_seqs=1, engine_version="2")
    assert compat_digest(other) == compat_digest(PROFILE)


def test_the_record_carries_the_engines_sizes_and_the_bound_on_waiting() -> None:
    record = runtime_config(WorkerConfig(role="decode"), PROFILE, WorkerId("w"), Epoch(1))
    assert (record.total_kv_blocks, record.max_waiting, record.state) == (100, 4 * 8 + 64, "ready")
    record = runtime_config(WorkerConfig(role="decode", max_waiting=3), PROFILE, WorkerId("w"), Epoch(1))
    assert record.max_waiting == 3


def test_a_default_id_tells_the_role_and_is_never_the_same() -> None:
    config = WorkerConfig(role="prefill")
    assert "-prefill-" in worker_id(config)
    assert worker_id(config) != worker_id(config)
