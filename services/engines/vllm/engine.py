"""VllmEngine: services.engines.protocol.Engine over vLLM's engine core."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine

import msgspec

from schemas.errors import BuswayError, ErrorRecord, RequestError, UnavailableError, WorkerLostError, error_from
from schemas.hop import DecodeRequest, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.model_card import ModelCard
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict
from services.engines.adapter.tick import TickEmitter
from services.engines.logged import logged
from services.engines.paged.limits import Limits
from services.engines.protocol import CacheChanged, Emit, EngineLoad, EngineProfile, PeerLink
from services.engines.vllm import own_metrics
from services.engines.vllm.core import CoreThread
from services.engines.vllm.decode import DecodeLeg
from services.engines.vllm.prefill import PrefillLeg
from services.engines.vllm.sampling import check_request
from services.engines.vllm.site import Site
from services.engines.vllm.words import CoreGauges, CoreSpec, LaunchOptions, StepReport
from services.pass_times import PassTimes

HOUSEKEEPING_S = 60.0


class VllmEngine:
    """One vLLM engine; run once. `card` is read from the model's folder: vLLM's own tokenizer is not used."""

    def __init__(self, card: ModelCard, options: LaunchOptions) -> None:
        self._card = card
        self._options = options
        self._core = CoreThread(options)
        self._gauges = CoreGauges()
        self._passes = PassTimes()
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
            spec = await self._core.start(self._on_step)
            async with asyncio.TaskGroup() as tasks:
                self._site = self._make_site(spec, worker, epoch, peers, emit, tasks)
                housekeeping = tasks.create_task(_forget_what_is_over(self._site), name="vllm-housekeeping")
                ready(self._profile(spec))
                try:
                    await self._core.join()
                finally:
                    housekeeping.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await self._core.stop()

    def prefill(self, leg: PrefillRequest) -> None:
        """See Engine."""
        site = self._running()
        if leg.request.attempt_id in site.legs:
            return
        if leg.bootstrap is not None:
            raise RequestError("vLLM hands over after prefill: it has no rendezvous", param="bootstrap")
        if not site.spec.connector:
            raise RequestError("this vLLM engine has no KV connector", param="engine_args")
        check_request(leg.request, has_priorities=site.spec.has_priorities)
        site.limits.check_hold(leg.request)
        PrefillLeg(site, leg).start()

    def decode(self, leg: DecodeRequest) -> None:
        """See Engine. A leg that is refused gives its KV back to prefill."""
        site = self._running()
        if leg.request.attempt_id in site.legs:
            return
        made = DecodeLeg(site, leg)
        try:
            check_request(leg.request, has_priorities=site.spec.has_priorities)
            site.limits.check_decode(leg.request)
        except BuswayError:
            made.abort(None)
            raise
        made.start()

    def abort(self, attempt_id: AttemptId, error: ErrorRecord | None = None) -> None:
        """See Engine."""
        site = self._running()
        leg = site.legs.get(attempt_id)
        if leg is not None:
            leg.abort(None if error is None else error_from(error))
        core_id = site.held.revoke(attempt_id, time.monotonic())
        if core_id is not None:
            site.core.release(core_id)

    async def answer(self, message: Message) -> Message:
        """See Engine."""
        site = self._running()
        held = site.held
        if isinstance(message, LeaseRequest | ConfirmRequest) and message.epoch != site.epoch:
            return Verdict(is_good=False, error=WorkerLostError("that KV was another epoch's").record())
        match message:
            case LeaseRequest():
                why = held.check(message.attempt_id)
            case ConfirmRequest():
                why = held.confirm(message.attempt_id, time.monotonic())
            case _:
                raise RequestError(f"vLLM doesn't answer {type(message).__name__}")
        return Verdict(is_good=why is None, error=None if why is None else why.record())

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine. vLLM's connector makes its own handshake when it first meets a peer."""

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine. vLLM sees it by itself; a question that nobody answers ends by its time."""

    def load(self) -> EngineLoad:
        """See Engine."""
        site = self._running()
        totals, legs = site.totals, site.legs.values()
        running = sum(leg.is_running() for leg in legs)
        return EngineLoad(
            running=running,
            waiting=len(legs) - running,
            num_held=self._gauges.num_delayed,
            kv_blocks_used=self._gauges.blocks_used,
            kv_blocks_cached=self._gauges.blocks_cached,
            kv_blocks_total=site.spec.num_blocks,
            kv_blocks_quarantined=0,
            queued_prefill_tokens=sum(leg.num_queued_tokens() for leg in legs),
            progress=self._core.progress,
            kv_transfer_bytes={"nixl": totals.num_transfer_bytes} if totals.num_transfer_bytes else {},
            num_remote_prefills=totals.num_remote_prefills,
            num_recomputed_tokens=totals.num_recomputed_tokens,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_tokens=totals.num_cached_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            prefill_cost=self._passes.cost(),
        )

    def _running(self) -> Site:
        if self._site is None:
            raise UnavailableError("the engine isn't ready")
        return self._site

    def _on_step(self, report: StepReport) -> None:
        site = self._site
        if site is None:
            return
        self._gauges = report.gauges
        if report.prefill_pass is not None:
            self._passes.note(*report.prefill_pass)
        if report.cache_changes:
            site.ticks.add([CacheChanged(changes=report.cache_changes)])
        site.totals.num_transfer_bytes += report.num_bytes
        for output in report.outputs:
            leg = site.by_core_id.get(output.id)
            if leg is not None:
                leg.take(output)
            elif output.kv_transfer_params is not None:  # aborted here while its last step was under way
                site.core.release(output.id)
        site.held.freed(report.freed, num_expired=report.num_expired, now=time.monotonic())
        site.ticks.flush()

    def _make_site(
        self,
        spec: CoreSpec,
        worker: WorkerId,
        epoch: Epoch,
        peers: PeerLink,
        emit: Emit,
        tasks: asyncio.TaskGroup,
    ) -> Site:
        def spawn(coroutine: Coroutine[object, object, None], name: str) -> "asyncio.Task[None]":
            return tasks.create_task(logged(coroutine, name), name=name)

        return Site(
            worker=worker,
            epoch=epoch,
            core=self._core,
            spec=spec,
            limits=_limits(spec, self._card),
            link=peers,
            ticks=TickEmitter(emit),
            policy=self._options.kv_load_failure,
            spawn=spawn,
        )

    def _profile(self, spec: CoreSpec) -> EngineProfile:
        return EngineProfile(
            backend="vllm",
            card=self._card,
            handoff="after_prefill",
            block_size=spec.block_size,
            total_kv_blocks=spec.num_blocks,
            max_num_seqs=spec.max_num_seqs,
            max_batched_tokens=spec.max_batched_tokens,
            max_context_tokens=spec.max_context_tokens,
            kv_layout=kv_layout(spec, self._options.model_path),
            kv_dtype=spec.kv_dtype,
            engine_version=spec.version,
            tp_size=spec.tp_size,
            pp_size=spec.pp_size,
            has_kv_events=spec.has_kv_events,
            own_metrics=_own_metrics,
        )


def kv_layout(spec: CoreSpec, model_path: str) -> str:
    """Return the digest of what both sides must share: the connector and its handshake's own digest, or for connectors
    without one vLLM's version, the model's path and the block size."""
    parts = (spec.connector, spec.handshake or [spec.version, model_path, spec.block_size])
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _limits(spec: CoreSpec, card: ModelCard) -> Limits:
    return Limits(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_context_tokens=spec.max_context_tokens,
        eos_token_ids=card.eos_token_ids,
        vocab_size=card.vocab_size,
    )


async def _own_metrics() -> bytes:
    return await asyncio.to_thread(own_metrics.text)


async def _forget_what_is_over(site: Site) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        site.held.forget(time.monotonic())
