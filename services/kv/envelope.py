"""The blob by which a peer reaches an agent: what must agree is checked before a library sees its part.

Mutated NIXL metadata once aborted the process by an assertion, so nothing reaches it whose checksum, lengths, layout
or name are off. That guards against accidents; who may send a blob is the bus's to judge.
"""

import hashlib

import msgspec

from schemas.errors import KvMismatchError
from services.kv.layout import KvRegion
from services.kv.process import Process, this_process

MAX_BLOB_BYTES = 1 << 20
CHECKSUM_BYTES = 32


class Envelope(msgspec.Struct, frozen=True, kw_only=True, tag="kv_agent.v1", forbid_unknown_fields=True):
    """A region and the process that serves it; `payload` is the transport's own part."""

    transport: str
    agent: str
    process: Process
    region: KvRegion
    payload: bytes


def seal(transport: str, agent: str, region: KvRegion, payload: bytes) -> bytes:
    """Return the blob for a region of this process."""
    envelope = Envelope(transport=transport, agent=agent, process=this_process(), region=region, payload=payload)
    body = msgspec.json.encode(envelope)
    return _checksum(body) + body


def open_envelope(blob: bytes, transport: str) -> Envelope:
    """Return what `seal` made. Raises KvMismatchError when the blob is of another kind or has been changed."""
    if len(blob) > MAX_BLOB_BYTES:
        raise KvMismatchError(f"an agent's blob has {len(blob)} bytes, more than {MAX_BLOB_BYTES}")
    checksum, body = blob[:CHECKSUM_BYTES], blob[CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise KvMismatchError("an agent's blob is damaged")
    try:
        envelope = msgspec.json.decode(body, type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KvMismatchError(f"an agent's blob can't be read: {error}") from error
    if envelope.transport != transport:
        raise KvMismatchError(f"the peer moves KV by {envelope.transport}, not {transport}")
    return envelope


def check_same_pool_shape(envelope: Envelope, ours: KvRegion, num_blocks: int) -> None:
    """Raise KvMismatchError unless the peer's blocks can be copied to ours as they are."""
    theirs = envelope.region
    if theirs.layout != ours.layout:
        raise KvMismatchError(f"KV layouts differ: {theirs.layout.digest()} at the peer, {ours.layout.digest()} here")
    if theirs.num_blocks != num_blocks or num_blocks <= 0:
        raise KvMismatchError(f"the peer's blob has {theirs.num_blocks} blocks, {num_blocks} were announced")
    if theirs.num_bytes < theirs.layout.block_bytes * num_blocks:
        raise KvMismatchError(f"{num_blocks} blocks don't fit the peer's {theirs.num_bytes} bytes")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
