"""A KvTransfer that takes as long as a slower link would: the sim engine's transfer_gb_per_s."""

import time

from schemas.errors import KvTransferError
from services.kv.layout import KvRegion
from services.kv.transfer import BlockIds, Direction, KvTransfer, TransferHandle


class PacedTransfer:
    """Wraps another transfer; each of its transfers completes no sooner than its bytes at `gb_per_s` (10^9 bytes).

    Transfers don't slow one another down.
    """

    def __init__(self, transfer: KvTransfer, gb_per_s: float) -> None:
        self._transfer = transfer
        self._bytes_per_s = gb_per_s * 1e9
        self._block_bytes = 0
        self._due: dict[TransferHandle, float] = {}

    @property
    def transport(self) -> str:
        return self._transfer.transport

    def allocate_host(self, num_bytes: int) -> memoryview:
        return self._transfer.allocate_host(num_bytes)

    def register(self, region: KvRegion) -> bytes:
        self._block_bytes = region.layout.block_bytes
        return self._transfer.register(region)

    def add_peer(self, name: str, blob: bytes, num_blocks: int) -> None:
        self._transfer.add_peer(name, blob, num_blocks)

    def remove_peer(self, name: str) -> None:
        self._transfer.remove_peer(name)

    def post(self, direction: Direction, peer: str, local: BlockIds, remote: BlockIds) -> TransferHandle:
        handle = self._transfer.post(direction, peer, local, remote)
        self._due[handle] = time.monotonic() + len(local) * self._block_bytes / self._bytes_per_s
        return handle

    def poll(self, handle: TransferHandle) -> bool:
        if time.monotonic() < self._due[handle]:
            return False
        try:
            is_complete = self._transfer.poll(handle)
        except KvTransferError:
            del self._due[handle]
            raise
        if is_complete:
            del self._due[handle]
        return is_complete

    def close(self) -> None:
        self._transfer.close()
