"""Who the other workers' transfer agents are: metadata exchanged over the PeerLink, connections made and warmed.

An agent's blob is taken only from here: from an answer to a question we asked, or from a peer that asked us, both
over the bus. The highest epoch of a worker wins.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

import msgspec

from schemas.errors import AckTimeoutError, BuswayError, KvMismatchError, KvTransferFailedError, WorkerLostError
from schemas.ids import Epoch, WorkerId
from schemas.peer import AgentMetadata, MetadataRequest
from services.engines.protocol import PeerLink
from services.kv.envelope import open_envelope
from services.kv.mover import Mover
from services.kv.process import Process

_log = logging.getLogger(__name__)

MAX_TRIES = 3

Spawn = Callable[[Coroutine[object, object, None], str], "asyncio.Task[None]"]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A connected peer: `name` is the mover's for it, `process` the one that could still write to our memory."""

    worker: WorkerId
    epoch: Epoch
    name: str
    host_id: str
    process: Process


class PeerBook:
    """Connections by (worker, epoch). Methods that connect raise KvTransferError, BusError or WorkerLostError."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        epoch: Epoch,
        agent: AgentMetadata,
        mover: Mover,
        link: PeerLink,
        spawn: Spawn,
    ) -> None:
        self.worker = worker
        self.epoch = epoch
        self.agent = agent
        self._mover = mover
        self._link = link
        self._spawn = spawn
        self._latest: dict[WorkerId, Epoch] = {}
        self._connections: dict[tuple[WorkerId, Epoch], asyncio.Future[Peer]] = {}

    async def connect(self, worker: WorkerId, epoch: Epoch) -> Peer:
        """Return the peer, connecting first where that hasn't been done; concurrent callers share one attempt."""
        return await asyncio.shield(self._connection(worker, epoch, None))

    def join(self, worker: WorkerId, epoch: Epoch) -> None:
        """Connect in the background; a failure is found again by whoever needs the peer."""
        if worker != self.worker and self._latest.get(worker, epoch) <= epoch:
            self._connection(worker, epoch, None)

    def introduce(self, request: MetadataRequest) -> AgentMetadata:
        """Take a peer's introduction (connecting in the background) and return our own.

        Raises KvMismatchError for an agent that can't be ours' peer, WorkerLostError for a superseded epoch.
        """
        self._check(request.agent, request.epoch)
        if request.worker != self.worker:
            self._connection(request.worker, request.epoch, request.agent)
        return self.agent

    def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Forget a peer; what is under way with it fails."""
        connection = self._connections.pop((worker, epoch), None)
        if connection is not None and connection.done() and connection.exception() is None:
            self._spawn(self._disconnect(connection.result()), "peer-leave")

    def _connection(self, worker: WorkerId, epoch: Epoch, introduced: AgentMetadata | None) -> "asyncio.Future[Peer]":
        key = (worker, epoch)
        known = self._connections.get(key)
        if known is not None and not (known.done() and known.exception() is not None):
            return known
        if self._latest.get(worker, epoch) > epoch:
            raise WorkerLostError(f"{worker} has been started anew since")
        self._supersede(worker, epoch)
        future: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._connections[key] = future
        self._spawn(self._establish(worker, epoch, introduced, future), "peer-connect")
        return future

    def _supersede(self, worker: WorkerId, epoch: Epoch) -> None:
        self._latest[worker] = epoch
        for known_worker, known_epoch in list(self._connections):
            if known_worker == worker and known_epoch < epoch:
                self.leave(known_worker, known_epoch)

    async def _establish(
        self, worker: WorkerId, epoch: Epoch, introduced: AgentMetadata | None, future: "asyncio.Future[Peer]"
    ) -> None:
        try:
            peer = await self._add_peer(worker, epoch, introduced)
            if self._connections.get((worker, epoch)) is not future:
                await self._disconnect(peer)
                raise WorkerLostError(f"{worker} has left meanwhile")
        except BuswayError as error:
            _log.debug("no KV transfer with %s: %s", worker, error)
            _fail(future, error)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            _fail(future, KvTransferFailedError(f"{type(error).__name__}: {error}"))
            raise
        else:
            future.set_result(peer)

    async def _add_peer(self, worker: WorkerId, epoch: Epoch, introduced: AgentMetadata | None) -> Peer:
        agent = introduced
        if agent is None:
            agent = await self._ask_for_agent(worker)
        self._check(agent, epoch)
        process = open_envelope(agent.blob, self.agent.transport).process
        name = f"{worker}@{epoch}"
        await self._mover.add_peer(name, agent.blob, agent.num_blocks)
        return Peer(worker=worker, epoch=epoch, name=name, host_id=agent.host_id, process=process)

    async def _ask_for_agent(self, worker: WorkerId) -> AgentMetadata:
        question = MetadataRequest(worker=self.worker, epoch=self.epoch, agent=self.agent)
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._link.ask(worker, question, AgentMetadata)
            except AckTimeoutError as error:
                _log.debug("%s is slow to say who it is: %s", worker, error)
        return await self._link.ask(worker, question, AgentMetadata)

    def _check(self, agent: AgentMetadata, epoch: Epoch) -> None:
        if agent.epoch != epoch:
            raise WorkerLostError(f"agent {agent.name} is of another epoch")
        if agent.transport != self.agent.transport:
            raise KvMismatchError(f"agent {agent.name} moves KV by {agent.transport}, not {self.agent.transport}")
        if agent.layout != self.agent.layout:
            raise KvMismatchError(f"agent {agent.name} has KV layout {agent.layout}, not {self.agent.layout}")

    async def _disconnect(self, peer: Peer) -> None:
        await self._mover.remove_peer(peer.name, is_proven_gone=peer.process.is_gone())


def _fail(future: "asyncio.Future[Peer]", error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # retrieved: nobody may be waiting
