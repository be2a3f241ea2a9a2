"""Moving KV blocks between processes: the small face that NIXL and shared memory both show.

All methods block and are called from one transfer thread (services.kv.mover), never from the event loop or the
engine's thread; `allocate_host` may be called from any. Nothing here knows requests, leases or the bus.
"""

from typing import Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

from schemas.errors import KvTransferFailedError
from services.kv.layout import KvRegion

BlockIds = npt.NDArray[np.int64]
Direction = Literal["read", "write"]
TransferHandle = NewType("TransferHandle", int)


class KvTransfer(Protocol):
    """An agent that serves this process's pool and moves blocks from and to its peers'."""

    @property
    def transport(self) -> str:
        """A short name for metrics: "nixl" or "shm"."""
        ...

    def allocate_host(self, num_bytes: int) -> memoryview:
        """Return zeroed, page-aligned memory that peers can be given access to; it lives until the process ends."""
        ...

    def register(self, region: KvRegion) -> bytes:
        """Serve this region; return the blob by which peers reach it. Once per agent."""
        ...

    def add_peer(self, name: str, blob: bytes, num_blocks: int) -> None:
        """Connect to a peer's region (same layout) and prepare its descriptors; replaces an earlier one of that name.

        Raises KvMismatchError for a blob that isn't valid, KvTransferFailedError when the peer can't be reached.
        """
        ...

    def warm(self, name: str) -> TransferHandle | None:
        """Start a first tiny transfer that touches no pool of ours, so that set-up is paid before a request needs
        it; polled like any other. None where there is nothing to warm."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer; idempotent. Transfers under way with it go on until they are terminal."""
        ...

    def post(self, direction: Direction, peer: str, local: BlockIds, remote: BlockIds) -> TransferHandle:
        """Start moving blocks: read remote[i] into local[i], or write local[i] to remote[i].

        Raises KvTransferFailedError for unknown peers, ids out of range and dead peers.
        """
        ...

    def poll(self, handle: TransferHandle) -> bool:
        """Return whether the transfer is complete; raises KvTransferFailedError when it has failed. Terminal
        either way: the handle is released."""
        ...

    def close(self) -> None:
        """Stop serving. Registered memory is left alone (freeing it kills peers in a tcp transfer)."""
        ...


def check_block_ids(local: BlockIds, remote: BlockIds, *, num_local: int, num_remote: int) -> None:
    """Raise KvTransferFailedError unless both lists pair up and lie within their pools."""
    if local.shape != remote.shape or local.ndim != 1:
        raise KvTransferFailedError(f"{local.shape} local blocks for {remote.shape} remote ones")
    for side, ids, num_blocks in (("local", local, num_local), ("remote", remote, num_remote)):
        if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
            raise KvTransferFailedError(f"a {side} block is outside 0 … {num_blocks - 1}")
