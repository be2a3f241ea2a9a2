"""What follows from an engine's profile, and what goes into it. Pure."""

import hashlib

import msgspec

from services.engines.paged.limits import Limits
from services.engines.protocol import EngineProfile


def limits_of(profile: EngineProfile) -> Limits:
    """Return what can ever fit an engine that says this of itself."""
    return Limits(
        num_blocks=profile.total_kv_blocks,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        max_batched_tokens=profile.max_batched_tokens,
        max_context_tokens=profile.max_context_tokens,
        eos_token_ids=profile.card.eos_token_ids,
        vocab_size=profile.card.vocab_size,
    )


def layout_digest(*parts: object) -> str:
    """Return the digest of what both sides of a transfer must share, in this order: 32 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
