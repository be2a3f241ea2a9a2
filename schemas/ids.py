"""The names of things. An id is ours, unguessable and of one length; a client's id is only ever a label."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
AttemptId = NewType("AttemptId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)

ATTEMPT_ID_LENGTH = 22


def new_attempt_id() -> AttemptId:
    """Return 128 random bits as 22 characters; every attempt id has this length (SGLang aborts by prefix)."""
    return AttemptId(secrets.token_urlsafe(16))


def new_request_id() -> RequestId:
    """Return 128 random bits as 22 characters."""
    return RequestId(secrets.token_urlsafe(16))


def new_room() -> int:
    """Return a bootstrap room in 1 … 2^63-1 (SGLang hangs on 0 and crashes on 2^63)."""
    return secrets.randbelow(2**63 - 1) + 1
