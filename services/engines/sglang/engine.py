"""SglangEngine: services.engines.protocol.Engine over sglang.Engine."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from schemas.errors import BuswayError, ErrorRecord, RequestError, UnavailableError, error_from
from schemas.handoff import BootstrapInfo
from schemas.hop import DecodeRequest, Ok, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.kv_events import KvChange
from schemas.message import Message
from schemas.model_card import ModelCard
from schemas.peer import Landed, MeetRequest, Stranded, Verdict
from services.engines.adapter.load import BlocksLoad, LegsLoad, engine_load
from services.engines.adapter.profile import layout_digest, limits_of
from services.engines.adapter.site import running
from services.engines.adapter.tick import TickEmitter
from services.engines.paged.limits import Limits
from services.engines.protocol import CacheChanged, Emit, EngineLoad, EngineProfile, PeerLink
from services.engines.sglang import own_metrics
from services.engines.sglang.decode import DecodeLeg
from services.engines.sglang.launch import FAKE_HOST
from services.engines.sglang.prefill import PrefillLeg
from services.engines.sglang.rooms import RoomBook
from services.engines.sglang.sampling import check_request
from services.engines.sglang.site import Site
from services.engines.sglang.thread import EngineThread
from services.engines.sglang.words import EngineSpec, Gauges, LaunchOptions, Output
from services.engines.tasks import housekeeping, one_error, spawner
from services.pass_times import PassTimes


class SglangEngine:
    """One SGLang engine; run once. `card` is read from the model's folder: SGLang's own tokenizer is not used."""

    def __init__(self, card: ModelCard, options: LaunchOptions, *, lease_s: float) -> None:
        self._card = card
        self._options = options
        self._lease_s = lease_s
        self._thread = EngineThread(options)
        self._gauges = Gauges()
        self._passes = PassTimes()
        self._num_cached = 0
        self._peers: set[tuple[WorkerId, Epoch]] = set()
        self._site: Site | None = None

    async def run(
        self,
        *,
        worker: WorkerId,
        epoch: Epoch,
        peers: PeerLink,
        emit: Emit,
        ready: Callable[[EngineProfile], None],
    ) -> None:
        """See Engine."""
        try:
            spec = await self._thread.start(self._on_outputs, self._on_gauges, self._on_cache)
            profile = self._profile(spec)
            async with one_error(), asyncio.TaskGroup() as tasks:
                site = self._site = Site(
                    worker=worker,
                    epoch=epoch,
                    limits=limits(spec, profile),
                    link=peers,
                    ticks=TickEmitter(emit),
                    spawn=spawner(tasks),
                    thread=self._thread,
                    spec=spec,
                    lease_s=self._lease_s,
                    peers=self._peers,
                    rooms=RoomBook(epoch),
                )
                with housekeeping(tasks, site.rooms.forget, "sglang-housekeeping"):
                    ready(profile)
                    await self._thread.join()
        finally:
            await self._thread.stop()

    def prefill(self, leg: PrefillRequest) -> None:
        """See Engine."""
        site = running(self._site)
        if leg.request.attempt_id in site.legs:
            return
        if leg.bootstrap is None or site.spec.endpoint is None:
            raise RequestError("SGLang's prefill needs a rendezvous, at a worker of role prefill", param="bootstrap")
        check_request(leg.request, site.spec)
        site.limits.check_hold(leg.request)
        PrefillLeg(site, leg, leg.bootstrap).start()

    def decode(self, leg: DecodeRequest) -> None:
        """See Engine. A leg that is refused lets its prefill go."""
        site = running(self._site)
        if leg.request.attempt_id in site.legs:
            return
        made = DecodeLeg(site, leg, leg.params if isinstance(leg.params, BootstrapInfo) else None)
        try:
            self._check_role(leg)
            check_request(leg.request, site.spec)
            site.limits.check_decode(leg.request)
        except BuswayError as error:
            made.refuse(error)
            raise
        made.start()

    def abort(self, attempt_id: AttemptId, error: ErrorRecord | None = None) -> None:
        """See Engine."""
        running(self._site).abort_attempt(attempt_id, error)

    async def answer(self, message: Message) -> Message:
        """See Engine."""
        site = running(self._site)
        leg = site.legs.get(getattr(message, "attempt_id", AttemptId("")))
        match message:
            case MeetRequest():
                return self._meet(message)
            case Stranded():
                if leg is not None:
                    leg.stranded(error_from(message.error))
                return Ok()
            case Landed():
                if leg is not None:
                    leg.landed(message)
                return Ok()
            case _:
                raise RequestError(f"SGLang doesn't answer {type(message).__name__}")

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine. SGLang's two sides make their connection when they first meet; known is who will be missed."""
        self._peers.add((worker, epoch))
        for leg in [] if self._site is None else list(self._site.legs.values()):
            leg.peer_joined(worker, epoch)

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine. SGLang would see it after its heartbeats."""
        self._peers.discard((worker, epoch))
        for leg in list(running(self._site).legs.values()):
            leg.peer_left(worker, epoch)

    def load(self) -> EngineLoad:
        """See Engine. Blocks are the scheduler's own count; it answers that between two steps, so its answers are
        progress too."""
        site, gauges = running(self._site), self._gauges
        spec = site.spec
        num_used = -(-gauges.num_used_tokens // spec.page_size)
        blocks = BlocksLoad(
            used=num_used,
            cached=max(0, self._num_cached - num_used),
            total=spec.num_tokens // spec.page_size,
            held=len(site.draining),
        )
        return engine_load(
            LegsLoad.of(site.legs.values()),
            blocks,
            site.totals,
            transport=spec.transfer_backend,
            progress=site.num_outputs + gauges.num_reports,
            prefill_cost=self._passes.cost(),
        )

    def _meet(self, message: MeetRequest) -> Verdict:
        site = running(self._site)
        leg = site.legs.get(message.attempt_id)
        if isinstance(leg, PrefillLeg):
            return leg.meet(message)
        try:  # it is over, well or badly, or was never here
            site.rooms.meet(message)
        except BuswayError as error:
            return Verdict(is_good=False, error=error.record())
        return Verdict(is_good=True)

    def _check_role(self, leg: DecodeRequest) -> None:
        """Raise for a leg whose KV can't come from where it says, or can't be made here."""
        params, role = leg.params, self._options.role
        if params is None:
            if role != "both":
                raise UnavailableError(f"SGLang computes no prompt for itself in the role {role}")
            return
        if not isinstance(params, BootstrapInfo):
            raise RequestError(f"SGLang can't use {type(params).__name__}", param="params")
        if role != "decode":
            raise RequestError(f"SGLang receives no KV in the role {role}", param="params")
        host, port = params.endpoint.host, params.endpoint.port
        if not host or host == FAKE_HOST or not port:
            raise RequestError(f"no prefill can be met at {host}:{port}", param="params")

    def _on_outputs(self, outputs: Sequence[Output]) -> None:
        site = self._site
        if site is not None:
            for output in outputs:
                site.take(output)
            site.ticks.flush()

    def _on_gauges(self, gauges: Gauges) -> None:
        """Between two looks there is one prefill pass or none; very short ones together count as one."""
        before, self._gauges = self._gauges, gauges
        num_tokens = gauges.num_computed_tokens - before.num_computed_tokens
        if num_tokens > 0:
            self._passes.note(num_tokens, (gauges.computing_us - before.computing_us) / 1e6)

    def _on_cache(self, changes: tuple[KvChange, ...], num_blocks: int) -> None:
        self._num_cached = num_blocks
        if self._site is not None:
            self._site.ticks.add([CacheChanged(changes=changes)])

    def _profile(self, spec: EngineSpec) -> EngineProfile:
        return EngineProfile(
            backend="sglang",
            card=self._card,
            handoff="rendezvous",
            block_size=spec.page_size,
            total_kv_blocks=spec.num_tokens // spec.page_size,
            max_num_seqs=spec.max_running,
            max_batched_tokens=spec.max_batched_tokens,
            max_context_tokens=spec.context_limit,
            kv_layout=kv_layout(spec),
            kv_dtype=spec.kv_dtype,
            engine_version=spec.version,
            tp_size=spec.tp_size,
            pp_size=spec.pp_size,
            bootstrap=spec.endpoint,
            has_kv_events=spec.has_kv_events,
            own_metrics=partial(asyncio.to_thread, own_metrics.text) if spec.has_metrics else None,
            computes_prompts=self._options.role != "decode",
        )


def kv_layout(spec: EngineSpec) -> str:
    """Return the digest of what both sides must share: SGLang's version, transfer backend, page size, pipeline; on CPUs
    the tensor parallel size too (SGLang moves KV between unequal ones on GPUs only)."""
    tp_size = spec.tp_size if spec.device == "cpu" else 0
    return layout_digest(spec.version, spec.transfer_backend, spec.page_size, spec.pp_size, tp_size)


def limits(spec: EngineSpec, profile: EngineProfile) -> Limits:
    """Return what SGLang serves without cutting a completion short."""
    return msgspec.structs.replace(limits_of(profile), num_blocks=spec.num_usable_blocks, vocab_size=spec.vocab_size)
