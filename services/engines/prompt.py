"""A request's prompt as the two legs of a handoff must agree on it. Pure."""

import hashlib

import numpy as np

from schemas.request import GenerateRequest


def prompt_digest(request: GenerateRequest) -> str:
    """Return what two legs' prompts must share: ids, resumed ids and salt."""
    digest = hashlib.sha256(request.cache_salt.encode())
    for ids in (request.token_ids, request.resume):
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.asarray(ids, np.int64).tobytes())
    return digest.hexdigest()[:32]


def num_prompt_tokens(request: GenerateRequest) -> int:
    """Return how many tokens' KV a handoff of this request moves: resumed ones are part of the prompt."""
    return len(request.token_ids) + len(request.resume)


def prompt_ids(request: GenerateRequest) -> list[int]:
    """Return the ids whose KV that is."""
    return [*request.token_ids, *request.resume]
