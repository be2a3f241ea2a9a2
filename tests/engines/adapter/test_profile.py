"""What follows from a profile, and the digest that says who may be paired with whom."""

import msgspec

from services.engines.adapter.profile import layout_digest, limits_of
from services.engines.paged.limits import Limits
from services.engines.protocol import EngineProfile
from services.engines.sim.card import builtin_card


def test_an_engines_limits_are_those_of_its_profile_and_its_models_card() -> None:
    card = msgspec.structs.replace(builtin_card(), eos_token_ids=(6, 7), vocab_size=99)
    profile = EngineProfile(
        backend="x",
        card=card,
        handoff="after_prefill",
        block_size=16,
        total_kv_blocks=100,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_context_tokens=512,
        kv_layout="",
        kv_dtype="float32",
        engine_version="1",
    )
    assert limits_of(profile) == Limits(
        num_blocks=100,
        block_size=16,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_context_tokens=512,
        eos_token_ids=(6, 7),
        vocab_size=99,
    )


def test_a_layouts_digest_stays_the_same_over_releases() -> None:
    """Workers of two releases meet in a rolling update: another digest would keep them apart."""
    assert layout_digest("0.32.0", "nixl", 16, 1, 0) == "2922e3b483d1187983fec8b6c504da46"


def test_another_value_or_another_order_is_another_layout() -> None:
    digests = {layout_digest("a", 1), layout_digest("a", 2), layout_digest(1, "a"), layout_digest("a", [1])}
    assert len(digests) == 4
