"""Which worker is a session's home. Pure: by rendezvous hashing, so that all routers agree without telling one another.

The worker whose hash with (salt, session) is the highest: when one leaves, only its own sessions move, and another
salt's session of the same name has a home of its own. The policy goes there as long as it costs at most
`session_slack_s`.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from schemas.ids import WorkerId
from schemas.request import GenerateRequest
from services.router.candidates import Candidate


def home_of(request: GenerateRequest, candidates: Sequence[Candidate]) -> WorkerId | None:
    """Return the session's worker among these; None for a request without a session."""
    if not request.session:
        return None
    key = f"{len(request.cache_salt)}:{request.cache_salt}{request.session}\0".encode()
    return max(
        (one.config.worker_id for one in candidates), key=lambda worker: xxh3_64_intdigest(key + worker.encode())
    )
