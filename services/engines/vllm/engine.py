"""VllmEngine: services.engines.protocol.Engine over vLLM's engine core."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from schemas.errors import BuswayError, ErrorRecord, RequestError, WorkerLostError
from schemas.hop import DecodeRequest, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.model_card import ModelCard
from schemas.peer import ConfirmRequest, LeaseRequest, Verdict
from services.engines.adapter.faults import output_fault
from services.engines.adapter.load import BlocksLoad, LegsLoad, engine_load
from services.engines.adapter.profile import layout_digest, limits_of
from services.engines.adapter.site import running
from services.engines.adapter.tick import TickEmitter
from services.engines.protocol import CacheChanged, Emit, EngineLoad, EngineProfile, PeerLink
from services.engines.tasks import housekeeping, one_error, spawner
from services.engines.vllm import own_metrics
from services.engines.vllm.core import CoreThread
from services.engines.vllm.decode import DecodeLeg
from services.engines.vllm.prefill import PrefillLeg
from services.engines.vllm.sampling import check_request
from services.engines.vllm.site import Leg, Site
from services.engines.vllm.words import CoreGauges, CoreOutput, CoreSpec, LaunchOptions, StepReport
from services.pass_times import PassTimes


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
            profile = self._profile(spec)
            async with one_error(), asyncio.TaskGroup() as tasks:
                site = self._site = Site(
                    worker=worker,
                    epoch=epoch,
                    limits=limits_of(profile),
                    link=peers,
                    ticks=TickEmitter(emit),
                    spawn=spawner(tasks),
                    core=self._core,
                    spec=spec,
                    policy=self._options.kv_load_failure,
                )
                with housekeeping(tasks, site.held.forget, "vllm-housekeeping"):
                    ready(profile)
                    await self._core.join()
        finally:
            await self._core.stop()

    def prefill(self, leg: PrefillRequest) -> None:
        """See Engine."""
        site = running(self._site)
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
        site = running(self._site)
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
        site = running(self._site)
        site.abort_attempt(attempt_id, error)
        core_id = site.held.revoke(attempt_id, time.monotonic())
        if core_id is not None:
            site.core.release(core_id)

    async def answer(self, message: Message) -> Message:
        """See Engine."""
        site = running(self._site)
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
        site, gauges = running(self._site), self._gauges
        blocks = BlocksLoad(
            used=gauges.blocks_used,
            cached=gauges.blocks_cached,
            total=site.spec.num_blocks,
            held=gauges.num_delayed,
        )
        return engine_load(
            LegsLoad.of(site.legs.values()),
            blocks,
            site.totals,
            transport="nixl",
            progress=self._core.progress,
            prefill_cost=self._passes.cost(),
        )

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
                self._take(site, leg, output)
            elif output.kv_transfer_params is not None:  # aborted here while its last step was under way
                site.core.release(output.id)
        site.held.freed(report.freed, num_expired=report.num_expired, now=time.monotonic())
        site.ticks.flush()

    def _take(self, site: Site, leg: Leg, output: CoreOutput) -> None:
        """Give a leg its output; what can't be read costs that leg alone, and frees what it held."""
        try:
            leg.take(output)
        except Exception as error:
            leg.abort(output_fault("vLLM", leg.attempt_id, error))
            site.held.revoke(leg.attempt_id, time.monotonic())
            if output.kv_transfer_params is not None:
                site.core.release(output.id)

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
            own_metrics=partial(asyncio.to_thread, own_metrics.text),
        )


def kv_layout(spec: CoreSpec, model_path: str) -> str:
    """Return the digest of what both sides must share: the connector and its handshake's own digest, or for connectors
    without one vLLM's version, the model's path and the block size."""
    return layout_digest(spec.connector, spec.handshake or [spec.version, model_path, spec.block_size])
