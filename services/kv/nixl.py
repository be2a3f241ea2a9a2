"""KvTransfer by NIXL (RDMA, NVLink, shared memory, tcp: whatever UCX finds between two processes).

One agent per process, used from one thread. Each pool's rows (layer, k|v, block) are described once, a transfer only
names indices. Facts behind the code: nixl-cu13 1.5.1 with UCX 1.23, measured; its Python API at nixl_cu13/_api.py.
"""

import importlib
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import KvMismatchError, KvTransferFailedError
from services.kv.envelope import Envelope, check_same_pool_shape, open_envelope, seal
from services.kv.layout import KvRegion
from services.kv.plan import row_indices
from services.kv.transfer import BlockIds, Direction, TransferHandle, check_block_ids

PROGRESS_DELAY_US = 1000
_METADATA_MAGIC = b"nixlSerDes|Agent"
_KEPT: list[object] = []  # what peers may still write to must outlive every agent object


class _Peer(msgspec.Struct, kw_only=True):
    """A connected peer. Once `is_removed` it goes with its last transfer under way."""

    agent: str
    rows: Any
    num_blocks: int
    num_in_flight: int = 0
    is_removed: bool = False


class _Posted(msgspec.Struct, frozen=True, kw_only=True):
    xfer: Any
    peer: _Peer
    is_done: bool


def keep_to_loopback() -> None:
    """Let UCX listen on and advertise the loopback device only, unless the user chose; before the first agent.

    For stacks of one machine: UCX would put its addresses on every interface, without authentication.
    """
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


def may_be_tcp() -> bool:
    """Return whether UCX may use tcp even between processes of one host: by UCX_TLS, or because the kernel forbids
    what its shared memory path (CMA) needs."""
    transports = os.environ.get("UCX_TLS", "all")
    if transports.startswith("^") or "tcp" in transports.split(","):
        return True
    ptrace_scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return ptrace_scope.exists() and int(ptrace_scope.read_text()) >= 2


class NixlTransfer:
    """A NIXL agent. Its NIXL name is new at each start, so that a restarted peer is never taken for its predecessor."""

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._api = _import_api()
        self._errors = tuple(
            value
            for name, value in vars(self._api.nixlBind).items()
            if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
        )
        self._name = f"busway-{os.getpid()}-{secrets.token_hex(8)}"
        self._agent: Any = None
        self._region: KvRegion | None = None
        self._rows: Any = None
        self._scratch: Any = None
        self._peers: dict[str, _Peer] = {}
        self._agents: dict[str, _Peer] = {}
        self._posted: dict[TransferHandle, _Posted] = {}
        self._num_posted = 0

    @property
    def transport(self) -> str:
        return "nixl"

    def allocate_host(self, num_bytes: int) -> memoryview:
        """See KvTransfer. Its pages are touched now: a peer's first read of untouched ones takes 100 times as long."""
        mapping = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0
        _KEPT.append(mapping)
        return memoryview(mapping)

    def register(self, region: KvRegion) -> bytes:
        """See KvTransfer; makes the agent."""
        if self._region is not None:
            raise RuntimeError("an agent serves one region")
        self._agent = _make_agent(self._api, self._name)
        scratch = self.allocate_host(region.layout.row_bytes)
        scratch_row = (np.frombuffer(scratch, np.uint8).ctypes.data, region.layout.row_bytes, 0)
        try:
            self._agent.register_memory(
                [(region.address, region.num_bytes, region.device_id, "")], mem_type=region.memory
            )
            self._agent.register_memory([(*scratch_row, "")], mem_type="DRAM")
            self._rows = self._agent.prep_xfer_dlist("", _row_table(region), mem_type=region.memory)
            self._scratch = self._agent.prep_xfer_dlist("", [scratch_row], mem_type="DRAM")
        except self._errors as error:
            raise KvTransferFailedError(f"NIXL can't serve the pool: {error}") from error
        self._region = region
        return seal("nixl", self._name, region, self._agent.get_agent_metadata())

    def add_peer(self, name: str, blob: bytes, num_blocks: int) -> None:
        """See KvTransfer."""
        if self._region is None:
            raise RuntimeError("register comes before add_peer")
        envelope = open_envelope(blob, "nixl")
        check_same_pool_shape(envelope, self._region, num_blocks)
        expected_name = _METADATA_MAGIC + len(envelope.agent).to_bytes(8, "little") + envelope.agent.encode()
        if not envelope.payload.startswith(expected_name) or envelope.agent == self._name:
            raise KvMismatchError("a blob's NIXL metadata isn't that of its agent")
        self.remove_peer(name)
        peer = self._agents.get(envelope.agent)
        if peer is None:
            peer = self._agents[envelope.agent] = self._connect(envelope)
        peer.is_removed = False  # one that was removed and still had transfers under way is as good as new
        self._peers[name] = peer

    def _connect(self, envelope: Envelope) -> _Peer:
        region = envelope.region
        try:
            self._agent.add_remote_agent(envelope.payload)
        except self._errors as error:
            raise KvTransferFailedError(f"NIXL can't take {envelope.agent}: {error}") from error
        try:
            rows = self._agent.prep_xfer_dlist(envelope.agent, _row_table(region), mem_type=region.memory)
            self._agent.make_connection(envelope.agent)
        except self._errors as error:
            self._agent.remove_remote_agent(envelope.agent)
            raise KvTransferFailedError(f"NIXL can't connect to {envelope.agent}: {error}") from error
        return _Peer(agent=envelope.agent, rows=rows, num_blocks=region.num_blocks)

    def warm(self, name: str) -> TransferHandle | None:
        """See KvTransfer: reads the peer's first row into a scratch row. The first transfer costs 2 to 270 ms."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        row = np.zeros(1, np.int32)
        return self._start("READ", peer, self._scratch, row, row)

    def remove_peer(self, name: str) -> None:
        """See KvTransfer."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.is_removed = True
            self._drop_if_unused(peer)

    def post(self, direction: Direction, peer: str, local: BlockIds, remote: BlockIds) -> TransferHandle:
        """See KvTransfer."""
        there = self._peers.get(peer)
        if there is None or self._region is None:
            raise KvTransferFailedError(f"no peer {peer}")
        num_blocks = self._region.num_blocks
        check_block_ids(local, remote, num_local=num_blocks, num_remote=there.num_blocks)
        layout = self._region.layout
        local_rows = row_indices(layout, num_blocks, local)
        remote_rows = row_indices(layout, there.num_blocks, remote)
        return self._start(direction.upper(), there, self._rows, local_rows, remote_rows)

    def poll(self, handle: TransferHandle) -> bool:
        """See KvTransfer."""
        posted = self._posted[handle]
        try:
            is_done = posted.is_done or self._agent.check_xfer_state(posted.xfer) == "DONE"
        except self._errors as error:
            self._finish(handle)
            raise KvTransferFailedError(f"NIXL: {error}") from error
        if is_done:
            self._finish(handle)
        return is_done

    def close(self) -> None:
        """See KvTransfer. The agent object stays: its end would deregister memory under peers' transfers."""
        if self._agent is not None:
            _KEPT.append((self._agent, self._rows, self._scratch, list(self._posted.values())))
        for name in list(self._peers):
            self.remove_peer(name)

    def _start(
        self, operation: str, peer: _Peer, local: Any, local_rows: npt.NDArray[np.int32], rows: npt.NDArray[np.int32]
    ) -> TransferHandle:
        try:
            xfer = self._agent.make_prepped_xfer(operation, local, local_rows, peer.rows, rows)
        except self._errors as error:
            raise KvTransferFailedError(f"NIXL: {error}") from error
        try:
            state = self._agent.transfer(xfer)
        except self._errors as error:
            self._release(xfer)
            raise KvTransferFailedError(f"NIXL: {error}") from error
        peer.num_in_flight += 1
        self._num_posted += 1
        handle = TransferHandle(self._num_posted)
        self._posted[handle] = _Posted(xfer=xfer, peer=peer, is_done=state == "DONE")
        return handle

    def _finish(self, handle: TransferHandle) -> None:
        posted = self._posted.pop(handle)
        self._release(posted.xfer)
        posted.peer.num_in_flight -= 1
        self._drop_if_unused(posted.peer)

    def _release(self, xfer: Any) -> None:
        try:
            self._agent.release_xfer_handle(xfer)
        except self._errors:
            _KEPT.append(xfer)  # NIXL still works on it: it must not be finalised

    def _drop_if_unused(self, peer: _Peer) -> None:
        """A peer's agent is removed only once nothing is under way with it: a stuck read would go on unwatched."""
        if not peer.is_removed or peer.num_in_flight:
            return
        del self._agents[peer.agent]
        try:
            self._agent.release_dlist_handle(peer.rows)
            self._agent.remove_remote_agent(peer.agent)
        except self._errors as error:
            raise KvTransferFailedError(f"NIXL can't forget {peer.agent}: {error}") from error


def _row_table(region: KvRegion) -> npt.NDArray[np.uint64]:
    """Return [num_layers x 2 x num_blocks, 3] of (address, bytes, device), in the order of plan.row_indices."""
    layout = region.layout
    num_rows = layout.num_layers * 2 * region.num_blocks
    table = np.empty((num_rows, 3), np.uint64)
    table[:, 0] = region.address + np.arange(num_rows, dtype=np.uint64) * np.uint64(layout.row_bytes)
    table[:, 1] = layout.row_bytes
    table[:, 2] = region.device_id
    return table


def _import_api() -> Any:
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._api"):
                raise
    raise ModuleNotFoundError("NIXL isn't installed: pip install nixl-cu13, or use --transfer shm")


def _make_agent(api: Any, name: str) -> Any:
    """Return an agent whose progress thread sleeps: the wheel hard-codes pthrDelay=0, half a core while idle.

    The wheel's constructor sets the field on a configuration it makes itself, so for that one call the class it
    makes has a property that keeps our delay.
    """
    plain = api.nixlBind.nixlAgentConfig

    def keep_delay(config: Any, _: int) -> None:
        plain.pthrDelay.fset(config, PROGRESS_DELAY_US)

    patient = type("PatientConfig", (plain,), {"pthrDelay": property(plain.pthrDelay.fget, keep_delay)})
    api.nixlBind.nixlAgentConfig = patient
    try:
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    finally:
        api.nixlBind.nixlAgentConfig = plain
