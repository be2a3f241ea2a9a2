"""KvTransfer through shared memory, for processes of one host: the second implementation, and the sim engine's.

The pool lies in a memfd: it has no name to guess or to clean up, and is gone with its last process, also after
kill -9. Peers of the same user open it as /proc/{pid}/fd/{fd}, which the kernel guards like ptrace, and check a
secret in its last page, so that a reused pid is never taken for the pool. Sealed against resizing: nobody can make
another's mapping fault.
"""

import fcntl
import mmap
import os
import secrets
import select
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import KvMismatchError, KvTransferFailedError
from services.kv.envelope import check_same_pool_shape, open_envelope, seal
from services.kv.layout import KvRegion
from services.kv.process import Process
from services.kv.transfer import BlockIds, Direction, TransferHandle, check_block_ids

_SECRET_BYTES = 32
_COPY_BYTES_PER_POLL = 4 << 20
_COPY_BYTES_PER_STEP = 1 << 20
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4

Pool = npt.NDArray[np.uint8]


class _Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A memfd of this process: the pool's bytes, then one page that starts with the secret."""

    fd: int
    num_bytes: int
    secret: bytes
    mapping: mmap.mmap
    address: int


class _Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The transport's part of a blob: where to find the segment and the pool in it."""

    fd: int
    num_bytes: int
    offset: int
    secret: bytes


class _Peer(msgspec.Struct, frozen=True, kw_only=True):
    pool: Pool
    pidfd: int
    num_blocks: int


class _Job(msgspec.Struct, kw_only=True):
    """A transfer under way: blocks before `num_copied` have been copied."""

    target: Pool
    source: Pool
    target_ids: BlockIds
    source_ids: BlockIds
    pidfd: int
    starts_at: float
    num_copied: int = 0


class ShmTransfer:
    """Copies by numpy (which lets go of the GIL). `gb_per_s` limits this agent's transfers together; None: no limit."""

    def __init__(self, *, gb_per_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if gb_per_s is not None and gb_per_s <= 0:
            raise ValueError(f"gb_per_s must be above 0, not {gb_per_s}")
        self._bytes_per_s = None if gb_per_s is None else gb_per_s * 1e9
        self._clock = clock
        self._link_free_at = 0.0
        self._segments: list[_Segment] = []
        self._region: KvRegion | None = None
        self._pool: Pool = np.empty((0, 0, 0), np.uint8)
        self._peers: dict[str, _Peer] = {}
        self._jobs: dict[TransferHandle, _Job] = {}
        self._num_posted = 0

    @property
    def transport(self) -> str:
        return "shm"

    def allocate_host(self, num_bytes: int) -> memoryview:
        """See KvTransfer."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("busway-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size + mmap.PAGESIZE)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        mapping = mmap.mmap(fd, size + mmap.PAGESIZE)
        secret = secrets.token_bytes(_SECRET_BYTES)
        mapping[size : size + _SECRET_BYTES] = secret
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._segments.append(_Segment(fd=fd, num_bytes=size, secret=secret, mapping=mapping, address=address))
        return memoryview(mapping)[:num_bytes]

    def register(self, region: KvRegion) -> bytes:
        """See KvTransfer; the region must lie in memory of `allocate_host`, else KvMismatchError."""
        if self._region is not None:
            raise RuntimeError("an agent serves one region")
        for segment in self._segments:
            offset = region.address - segment.address
            if region.memory == "DRAM" and offset >= 0 and offset + region.num_bytes <= segment.num_bytes:
                break
        else:
            raise KvMismatchError("shared memory serves host memory only that allocate_host has given")
        self._region = region
        self._pool = _pool_view(segment.mapping, offset, region)
        address = _Address(fd=segment.fd, num_bytes=segment.num_bytes, offset=offset, secret=segment.secret)
        return seal("shm", f"shm-{os.getpid()}", region, msgspec.json.encode(address))

    def add_peer(self, name: str, blob: bytes, num_blocks: int) -> None:
        """See KvTransfer."""
        if self._region is None:
            raise RuntimeError("register comes before add_peer")
        envelope = open_envelope(blob, "shm")
        check_same_pool_shape(envelope, self._region, num_blocks)
        address = _decode_address(envelope.payload, envelope.region)
        pidfd = _open_process(envelope.process)
        try:
            mapping = _map_segment(envelope.process.pid, address)
        except BaseException:
            os.close(pidfd)
            raise
        self.remove_peer(name)
        pool = _pool_view(mapping, address.offset, envelope.region)
        self._peers[name] = _Peer(pool=pool, pidfd=pidfd, num_blocks=num_blocks)

    def warm(self, name: str) -> TransferHandle | None:
        """See KvTransfer: a mapping is warm as it is."""
        return None

    def remove_peer(self, name: str) -> None:
        """See KvTransfer; the mapping goes with the last job that uses it."""
        peer = self._peers.pop(name, None)
        if peer is not None and not any(job.pidfd == peer.pidfd for job in self._jobs.values()):
            os.close(peer.pidfd)

    def post(self, direction: Direction, peer: str, local: BlockIds, remote: BlockIds) -> TransferHandle:
        """See KvTransfer."""
        there = self._peers.get(peer)
        if there is None or self._region is None:
            raise KvTransferFailedError(f"no peer {peer}")
        check_block_ids(local, remote, num_local=self._region.num_blocks, num_remote=there.num_blocks)
        _check_alive(there.pidfd)
        ours, theirs = (self._pool, local), (there.pool, remote)
        (source, source_ids), (target, target_ids) = (theirs, ours) if direction == "read" else (ours, theirs)
        job = _Job(
            target=target,
            source=source,
            target_ids=target_ids,
            source_ids=source_ids,
            pidfd=there.pidfd,
            starts_at=self._take_link(len(local) * self._region.layout.block_bytes),
        )
        self._num_posted += 1
        handle = TransferHandle(self._num_posted)
        self._jobs[handle] = job
        return handle

    def poll(self, handle: TransferHandle) -> bool:
        """See KvTransfer; copies up to 4 MiB, as far as the link's rate allows."""
        job = self._jobs[handle]
        try:
            _check_alive(job.pidfd)
            self._copy(job)
        except BaseException:
            self._forget(handle)
            raise
        if job.num_copied < len(job.source_ids):
            return False
        self._forget(handle)
        return True

    def close(self) -> None:
        """See KvTransfer."""
        self._jobs.clear()
        for name in list(self._peers):
            self.remove_peer(name)

    def _take_link(self, num_bytes: int) -> float:
        """Return when a transfer of this size may start, and book the link for it: transfers share the rate in turn."""
        starts_at = max(self._clock(), self._link_free_at)
        if self._bytes_per_s is not None:
            self._link_free_at = starts_at + num_bytes / self._bytes_per_s
        return starts_at

    def _copy(self, job: _Job) -> None:
        block_bytes = job.source.shape[0] * job.source.shape[2]
        end = min(len(job.source_ids), job.num_copied + max(1, _COPY_BYTES_PER_POLL // block_bytes))
        if self._bytes_per_s is not None:
            end = min(end, int(max(0.0, self._clock() - job.starts_at) * self._bytes_per_s / block_bytes))
        step = max(1, _COPY_BYTES_PER_STEP // block_bytes)
        while job.num_copied < end:
            piece = slice(job.num_copied, min(end, job.num_copied + step))
            job.target[:, job.target_ids[piece]] = job.source[:, job.source_ids[piece]]
            job.num_copied = piece.stop

    def _forget(self, handle: TransferHandle) -> None:
        job = self._jobs.pop(handle)
        in_use = {peer.pidfd for peer in self._peers.values()} | {other.pidfd for other in self._jobs.values()}
        if job.pidfd not in in_use:
            os.close(job.pidfd)


def _pool_view(mapping: mmap.mmap, offset: int, region: KvRegion) -> Pool:
    """Return a pool as [num_layers x 2, num_blocks, row_bytes] bytes."""
    layout = region.layout
    num_bytes = layout.block_bytes * region.num_blocks
    flat = np.frombuffer(mapping, np.uint8, count=num_bytes, offset=offset)
    return flat.reshape(layout.num_layers * 2, region.num_blocks, layout.row_bytes)


def _decode_address(payload: bytes, region: KvRegion) -> _Address:
    try:
        address = msgspec.json.decode(payload, type=_Address)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KvMismatchError(f"a shared memory address can't be read: {error}") from error
    if address.offset < 0 or address.offset + region.num_bytes > address.num_bytes or address.fd < 0:
        raise KvMismatchError("a shared memory address lies outside its segment")
    return address


def _open_process(process: Process) -> int:
    """Return a pidfd, which becomes readable when the process ends. Raises KvTransferFailedError when it has."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        raise KvTransferFailedError(f"the peer's process {process.pid} can't be reached: {error}") from error
    if process.is_gone():
        os.close(pidfd)
        raise KvTransferFailedError(f"the peer's process {process.pid} is gone")
    return pidfd


def _map_segment(pid: int, address: _Address) -> mmap.mmap:
    """Return a mapping of the peer's segment, its secret checked."""
    try:
        fd = os.open(f"/proc/{pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise KvTransferFailedError(f"the peer's memory can't be opened: {error}") from error
    try:
        if os.fstat(fd).st_size != address.num_bytes + mmap.PAGESIZE:
            raise KvTransferFailedError("the peer's memory has another size")
        mapping = mmap.mmap(fd, address.num_bytes + mmap.PAGESIZE)
    finally:
        os.close(fd)
    secret = mapping[address.num_bytes : address.num_bytes + _SECRET_BYTES]
    if not secrets.compare_digest(secret, address.secret):
        raise KvTransferFailedError("that memory isn't the peer's any more")
    return mapping


def _check_alive(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if poller.poll(0):
        raise KvTransferFailedError("the peer's process is gone")
