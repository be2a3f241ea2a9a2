"""The worker's engine among its peers: requests to theirs, answers to them, and who they are."""

import logging
from collections.abc import Iterable
from typing import Literal, TypeVar

from bus.connection import Bus
from bus.serving import Call
from bus.subjects import PeerVerb
from schemas.ids import Epoch, WorkerId
from schemas.message import Message
from schemas.peer import (
    ConfirmRequest,
    Landed,
    LeaseRequest,
    MeetRequest,
    MetadataRequest,
    Stranded,
    WriteRequest,
)
from schemas.worker import Record, RuntimeConfig
from services.engines.protocol import Engine

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)

VERBS: dict[type[Message], PeerVerb] = {
    MetadataRequest: "metadata",
    WriteRequest: "write",
    LeaseRequest: "lease",
    ConfirmRequest: "confirm",
    MeetRequest: "meet",
    Landed: "landed",
    Stranded: "stranded",
}


class BusPeerLink:
    """services.engines.protocol.PeerLink over the bus: `peer.{worker_id}.{verb}`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, worker: WorkerId, message: Message, answer: type[A], *, timeout_s: float = 1.0) -> A:
        """Ask another worker's engine; raises as PeerLink says."""
        subject = self._bus.subjects.peer(worker, VERBS[type(message)])
        return await self._bus.ask(subject, message, answer, timeout_s=timeout_s)


async def serve_peers(bus: Bus, engine: Engine, worker: WorkerId) -> None:
    """Let the engine answer its peers until the bus ends."""

    async def answer(message: Message, call: Call) -> Message:
        return await engine.answer(message)

    for expected, verb in VERBS.items():
        await bus.serve(bus.subjects.peer(worker, verb), expected, answer)


class PeerWatch:
    """Tells the engine who can hand KV to it, or take it: workers of the other role in its compatibility group.

    Whoever was a peer before a change of role stays known until it leaves: the engine may still wait for it.
    """

    def __init__(self, engine: Engine, me: RuntimeConfig) -> None:
        self._engine = engine
        self._me = me
        self._epochs: dict[WorkerId, Epoch] = {}

    def on_change(self, kind: Literal["joined", "changed", "left"], record: Record) -> None:
        """Take a change of the fleet, as bus.discovery tells it."""
        if not isinstance(record, RuntimeConfig):
            return
        known = self._epochs.get(record.worker_id)
        if kind == "left" and known == record.epoch:
            del self._epochs[record.worker_id]
            self._engine.peer_left(record.worker_id, record.epoch)
        elif kind != "left" and known is None and is_pair(self._me, record):
            self._epochs[record.worker_id] = record.epoch
            self._engine.peer_joined(record.worker_id, record.epoch)

    def become(self, me: RuntimeConfig, workers: Iterable[RuntimeConfig]) -> None:
        """This worker serves in another role; `workers` are the live ones."""
        self._me = me
        for worker in workers:
            self.on_change("changed", worker)


def is_pair(one: RuntimeConfig, other: RuntimeConfig) -> bool:
    """Return whether the two can hand over to each other."""
    return one.compat == other.compat and {one.role, other.role} == {"prefill", "decode"}
