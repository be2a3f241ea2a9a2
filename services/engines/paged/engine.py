"""The paged engine: a ModelRunner on its own thread, a KvTransfer on another, and the handoffs between workers.

Implements services.engines.protocol.Engine; knows nothing of the bus. The scheduler sees no transfers and the
handoffs no sequences: they meet at the Desk.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from schemas.errors import ErrorRecord, RequestError, UnavailableError, error_from
from schemas.frames import Begun, Failed, Finished, Timings, Tokens
from schemas.handoff import BootstrapEndpoint, BootstrapInfo, KvTicket
from schemas.hop import DecodeRequest, PrefillDone, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.peer import AgentMetadata
from services.config import HandoffMode
from services.engines.paged.answers import Answers
from services.engines.paged.desk import Notice
from services.engines.paged.handoff import HandoffOptions, HandoffSite, Leg
from services.engines.paged.loop import EngineThread
from services.engines.paged.peers import PeerBook
from services.engines.paged.prefill_leg import PrefillLeg
from services.engines.paged.pull import PullDecode, PullPrefill
from services.engines.paged.rendezvous import MeetDecode, MeetPrefill
from services.engines.paged.runner import ModelRunner, RunnerSpec
from services.engines.pause import PausePoints
from services.engines.protocol import CacheChanged, Emit, EngineEvent, EngineLoad, EngineProfile, PeerLink
from services.engines.tasks import one_error, spawner
from services.kv.lease import LeaseTable
from services.kv.mover import Mover
from services.kv.process import host_id
from services.kv.transfer import KvTransfer

HOUSEKEEPING_S = 5.0


class PagedEngine:
    """One engine; run once. `transfer` serves the runner's pool."""

    def __init__(
        self,
        runner: ModelRunner,
        transfer: KvTransfer,
        *,
        handoff: HandoffMode = "pull",
        options: HandoffOptions | None = None,
        pauses: PausePoints | None = None,
    ) -> None:
        self._handoff = handoff
        self._pauses = pauses or PausePoints()
        self._options = options or HandoffOptions()
        self._desk = EngineThread(runner, transfer.allocate_host)
        self._mover = Mover(transfer)
        self._site: HandoffSite | None = None
        self._answers: Answers | None = None

    async def run(
        self,
        *,
        worker: WorkerId,
        epoch: Epoch,
        peers: PeerLink,
        emit: Emit,
        ready: Callable[[EngineProfile], None],
    ) -> None:
        """See Engine. The handoffs are tasks of the group made here: none outlives it."""
        try:
            spec = await self._desk.start(self._on_notices)
            agent = await self._serve_pool(spec, worker, epoch)
            async with one_error(), asyncio.TaskGroup() as tasks:
                self._site = self._make_site(spec, agent, worker, peers, emit, tasks)
                self._answers = Answers(self._site)
                tasks.create_task(_forget_what_is_over(self._site), name="handoff-housekeeping")
                tasks.create_task(self._mover.join(), name="kv-mover")
                ready(_profile(spec, self._handoff, self._mover.transport))
                await self._desk.join()
        finally:
            await self._desk.stop()
            await self._mover.stop()

    def prefill(self, leg: PrefillRequest) -> None:
        """See Engine."""
        site, attempt_id = self._running(), leg.request.attempt_id
        if attempt_id in site.legs:
            return
        if leg.bootstrap is None:
            PullPrefill(site, leg).start()
        elif attempt_id in site.timings:  # its decode leg runs here, on its own
            site.emit([PrefillDone(attempt_id=attempt_id, params=leg.bootstrap)])
        elif site.leases.state(attempt_id, time.monotonic()) == "revoked":
            raise UnavailableError("decode has given the attempt up")
        else:
            MeetPrefill(site, leg, leg.bootstrap).start()

    def decode(self, leg: DecodeRequest) -> None:
        """See Engine."""
        site, params = self._running(), leg.params
        known = site.legs.get(leg.request.attempt_id)
        if isinstance(known, PullDecode | MeetDecode):
            return
        if params is None or _is_local(params, site):
            self._decode_alone(site, leg, known)
        elif isinstance(params, KvTicket):
            PullDecode(site, leg, params).start()
        elif isinstance(params, BootstrapInfo):
            MeetDecode(site, leg, params).start()
        else:
            raise RequestError(f"this engine can't use {type(params).__name__}", param="params")

    def abort(self, attempt_id: AttemptId, error: ErrorRecord | None = None) -> None:
        """See Engine."""
        site = self._running()
        leg = site.legs.get(attempt_id)
        if leg is not None:
            leg.abort(None if error is None else error_from(error))
        else:
            if error is None:
                site.timings.pop(attempt_id, None)
            self._desk.abort(attempt_id, error=error)

    async def answer(self, message: Message) -> Message:
        """See Engine."""
        if self._answers is None:
            raise UnavailableError("the engine isn't ready")
        return await self._answers.answer(message)

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine."""
        self._running().peers.join(worker, epoch)

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine."""
        site = self._running()
        site.peers.leave(worker, epoch)
        for leg in list(site.legs.values()):
            leg.peer_left(worker, epoch)

    def load(self) -> EngineLoad:
        """See Engine."""
        load, totals = self._desk.load(), self._running().totals
        return EngineLoad(
            **msgspec.structs.asdict(load),
            kv_transfer_bytes=dict(totals.kv_transfer_bytes),
            num_remote_prefills=totals.num_remote_prefills,
            transfer_cost=totals.transfer_cost,
        )

    def agent(self) -> AgentMetadata:
        """Return what peers are told of this engine's transfer agent."""
        return self._running().peers.agent

    def open_handoffs(self) -> list[AttemptId]:
        """Return the attempts whose handoff is under way here, for leak checks."""
        site = self._running()
        return [*site.legs, *site.writes]

    def _running(self) -> HandoffSite:
        if self._site is None:
            raise UnavailableError("the engine isn't ready")
        return self._site

    async def _serve_pool(self, spec: RunnerSpec, worker: WorkerId, epoch: Epoch) -> AgentMetadata:
        blob = await self._mover.start(self._desk.region())
        return AgentMetadata(
            name=f"{worker}@{epoch}",
            epoch=epoch,
            transport=self._mover.transport,
            layout=spec.layout.digest(),
            host_id=host_id(),
            num_blocks=spec.num_blocks,
            blob=blob,
        )

    def _make_site(
        self,
        spec: RunnerSpec,
        agent: AgentMetadata,
        worker: WorkerId,
        link: PeerLink,
        emit: Emit,
        tasks: asyncio.TaskGroup,
    ) -> HandoffSite:
        mover, spawn = self._mover, spawner(tasks)
        return HandoffSite(
            desk=self._desk,
            mover=mover,
            link=link,
            peers=PeerBook(worker=worker, epoch=agent.epoch, agent=agent, mover=mover, link=link, spawn=spawn),
            leases=LeaseTable(max_lease_s=self._options.lease_s),
            options=self._options,
            block_size=spec.layout.block_size,
            pauses=self._pauses,
            emit=emit,
            spawn=spawn,
        )

    def _decode_alone(self, site: HandoffSite, leg: DecodeRequest, prefill: Leg | None) -> None:
        """Compute and decode here: aggregated, or both legs came to this worker (the prompt's blocks are cached)."""
        if isinstance(prefill, PrefillLeg):
            prefill.yield_to_decode()
        self._desk.generate(leg.request)
        if leg.params is not None:
            site.timings[leg.request.attempt_id] = Timings()

    def _on_notices(self, notices: Sequence[Notice]) -> None:
        site = self._running()
        events: list[EngineEvent] = []
        for notice in notices:
            if isinstance(notice, CacheChanged):
                events.append(notice)
                continue
            leg = site.legs.get(notice.attempt_id)
            if isinstance(notice, Tokens):
                events.append(notice)
            elif isinstance(notice, Begun):
                arrived = site.timings.get(notice.attempt_id)
                timings = _with_arrival(notice.timings, arrived)
                events.append(msgspec.structs.replace(notice, timings=timings))
            elif isinstance(notice, Finished | Failed):
                event = leg.ended(notice) if leg is not None else notice
                arrived = site.timings.pop(notice.attempt_id, None)
                if arrived is not None and isinstance(event, Finished):
                    event = msgspec.structs.replace(event, timings=_with_arrival(event.timings, arrived))
                events.append(event)
            elif leg is not None:
                leg.notice(notice)
        if events:
            site.emit(events)


async def _forget_what_is_over(site: HandoffSite) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        now = time.monotonic()
        site.leases.forget(now)
        while site.landed and (oldest := next(iter(site.landed.items())))[1] <= now:
            del site.landed[oldest[0]]


def _is_local(params: object, site: HandoffSite) -> bool:
    return isinstance(params, KvTicket | BootstrapInfo) and (params.prefill_worker, params.epoch) == (
        site.peers.worker,
        site.peers.epoch,
    )


def _with_arrival(timings: Timings, arrived: Timings | None) -> Timings:
    """Return a sequence's timings with what its handoff says of the time until the KV was here, if it had one."""
    if arrived is None or arrived == Timings():
        return timings
    return msgspec.structs.replace(arrived, decode_s=timings.decode_s)


def _profile(spec: RunnerSpec, handoff: HandoffMode, kv_transport: str) -> EngineProfile:
    layout = spec.layout
    is_rendezvous = handoff == "rendezvous"
    return EngineProfile(
        backend=spec.backend,
        card=spec.card,
        handoff="rendezvous" if is_rendezvous else "after_prefill",
        block_size=layout.block_size,
        total_kv_blocks=spec.num_blocks,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_context_tokens=spec.max_context_tokens,
        kv_layout=layout.digest(),
        kv_dtype=layout.dtype,
        kv_transport=kv_transport,
        engine_version=spec.engine_version,
        tp_size=layout.tp_size,
        bootstrap=BootstrapEndpoint() if is_rendezvous else None,
        can_resume_exactly=spec.is_deterministic,
        has_kv_events=True,
        can_change_role=True,
    )
