"""TensorRT-LLM as an Engine: its LLM loaded on a thread, one leg a request, its statistics polled.

Context (prefill) and generation (decode) workers are two such engines; the KV between them is moved by TensorRT-LLM's
own transceiver. Aggregated on workers of the role `both`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from schemas.errors import EngineError, ErrorRecord, KvMismatchError, RequestError
from schemas.handoff import TrtllmDisaggregatedParams
from schemas.hop import DecodeRequest, PrefillEnded, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.message import Message
from schemas.model_card import ModelCard
from schemas.peer import ConfirmRequest, Verdict
from services.engines.adapter.profile import limits_of
from services.engines.adapter.site import running
from services.engines.adapter.tick import TickEmitter
from services.engines.prompt import num_prompt_tokens
from services.engines.protocol import CacheChanged, Emit, EngineLoad, EngineProfile, PeerLink
from services.engines.tasks import one_error, spawner
from services.engines.trtllm.api import Llm, TrtllmApi
from services.engines.trtllm.context_leg import ContextLeg
from services.engines.trtllm.facts import DEFAULT_KV_TIMEOUT_S, kv_capacity, kv_timeout_s, profile
from services.engines.trtllm.generation_leg import GenerationLeg, resumed_end, worker_lost
from services.engines.trtllm.held import HeldKv
from services.engines.trtllm.ids import DisaggIds
from services.engines.trtllm.kv_events import KvEventBook
from services.engines.trtllm.load import LoadBook
from services.engines.trtllm.own_metrics import OwnMetrics
from services.engines.trtllm.site import Site, Submitter, now_s

logger = logging.getLogger(__name__)

STATISTICS_IDLE_S = 0.5
STATISTICS_PAUSE_S = 0.2
EVENTS_IDLE_S = 0.5
EVENTS_PAUSE_S = 0.02


class TrtllmEngine:
    """One LLM; run once. `kwargs` are LLM's (args.llm_kwargs), `card` is the model's.

    `kv_load_failure`: whether decode computes a prompt itself whose KV doesn't come.
    """

    def __init__(
        self,
        api: TrtllmApi,
        kwargs: Mapping[str, Any],
        card: ModelCard,
        *,
        kv_load_failure: Literal["recompute", "fail"] = "recompute",
    ) -> None:
        self._api = api
        self._kwargs = dict(kwargs)
        self._card = card
        self._recomputes = kv_load_failure == "recompute"
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
        """See Engine. Legs are tasks of the group made here; the LLM is shut down on the way out."""
        api = self._api
        llm: Llm = await asyncio.to_thread(lambda: api.make_llm(**self._kwargs))
        try:
            async with one_error(), asyncio.TaskGroup() as tasks:
                await _warm_up(api, llm, self._card)
                engine_profile = profile(api, llm.args, self._card, await kv_capacity(llm))
                died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._site = self._make_site(api, llm, engine_profile, worker, epoch, peers, emit, tasks, died)
                if llm.args.enable_iter_perf_stats:
                    tasks.create_task(_watch_statistics(llm, self._site), name="trtllm-statistics")
                if llm.args.kv_cache_config.event_buffer_max_size:
                    book = KvEventBook(engine_profile.block_size)
                    tasks.create_task(_watch_kv_events(llm, book, self._site), name="trtllm-kv-events")
                ready(engine_profile)
                await died
        finally:
            await asyncio.to_thread(llm.shutdown)

    def prefill(self, leg: PrefillRequest) -> None:
        """See Engine."""
        site, request = running(self._site), leg.request
        if request.attempt_id in site.legs:
            return
        if leg.bootstrap is not None:
            raise RequestError("TensorRT-LLM hands KV over after prefill, not by rendezvous", param="bootstrap")
        limits = site.limits
        if limits.is_complete(request):
            end = resumed_end(request, limits.stop_ids(request))
            site.ticks.add(
                [
                    PrefillEnded(
                        attempt_id=request.attempt_id, token_id=request.resume[-1], reason=end.reason, is_delivered=True
                    )
                ]
            )
            return
        limits.check_hold(request)
        ContextLeg(site, leg).start()

    def decode(self, leg: DecodeRequest) -> None:
        """See Engine."""
        site, request, params = running(self._site), leg.request, leg.params
        if request.attempt_id in site.legs:
            return
        if params is not None and not isinstance(params, TrtllmDisaggregatedParams):
            raise RequestError(f"TensorRT-LLM can't use {type(params).__name__}", param="params")
        num_tokens = num_prompt_tokens(request)
        if params is not None and params.num_tokens not in (0, num_tokens):
            raise KvMismatchError(f"the KV is of a prompt of {params.num_tokens} tokens, the request has {num_tokens}")
        limits = site.limits
        if limits.is_complete(request):
            site.ticks.add([resumed_end(request, limits.stop_ids(request))])
            return
        limits.check_decode(request)
        GenerationLeg(site, leg, params).start()

    def abort(self, attempt_id: AttemptId, error: ErrorRecord | None = None) -> None:
        """See Engine. KV that waits to be fetched can't be freed by anybody: the engine's time-out does it."""
        running(self._site).abort_attempt(attempt_id, error)

    async def answer(self, message: Message) -> Message:
        """See Engine. Decode says that it has the KV; the rest passes between TensorRT-LLM's transceivers."""
        site = running(self._site)
        if not isinstance(message, ConfirmRequest):
            raise RequestError(f"TensorRT-LLM answers no {type(message).__name__}")
        is_ours = message.epoch == site.epoch
        return Verdict(is_good=is_ours and site.held.fetched(message.attempt_id))

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine. The transceivers connect by the params of each handoff."""

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Engine."""
        for leg in list(running(self._site).legs.values()):
            if isinstance(leg, GenerationLeg) and leg.awaits == (worker, epoch):
                leg.lose_kv(worker_lost(worker))

    def load(self) -> EngineLoad:
        """See Engine."""
        site = running(self._site)
        return site.book.load([*site.legs.values(), *site.draining], site.totals, now_s())

    def _make_site(
        self,
        api: TrtllmApi,
        llm: Llm,
        engine_profile: EngineProfile,
        worker: WorkerId,
        epoch: Epoch,
        peers: PeerLink,
        emit: Emit,
        tasks: asyncio.TaskGroup,
        died: "asyncio.Future[None]",
    ) -> Site:
        def follow(coroutine: Coroutine[object, object, None], name: str) -> "asyncio.Task[None]":
            return tasks.create_task(coroutine, name=name)

        def on_death(error: Exception) -> None:
            if not died.done():
                died.set_exception(EngineError(f"TensorRT-LLM has shut down: {error}"))

        held = HeldKv(_known_kv_timeout_s(llm))
        return Site(
            worker=worker,
            epoch=epoch,
            limits=limits_of(engine_profile),
            link=peers,
            ticks=TickEmitter(emit),
            spawn=spawner(tasks),
            follow=follow,
            engine=Submitter(api, llm, engine_profile.card.eos_token_ids, on_death),
            book=LoadBook(
                block_size=engine_profile.block_size,
                total_blocks=engine_profile.total_kv_blocks,
                max_num_seqs=engine_profile.max_num_seqs,
                held=held,
            ),
            held=held,
            ids=DisaggIds(worker, epoch),
            recomputes=self._recomputes,
            metrics=None if api.metrics_collector is None else OwnMetrics(api.metrics_collector, self._card.model),
        )


async def _warm_up(api: TrtllmApi, llm: Llm, card: ModelCard) -> None:
    """Generate one token: the engine works, and has statistics from now on [E]."""
    end_id = card.eos_token_ids[0] if card.eos_token_ids else 0
    sampling = api.sampling_params(end_id=end_id, max_tokens=1, ignore_eos=True, top_k=1, detokenize=False)
    finish_reason = None
    async for output in llm.generate_async([end_id], sampling_params=sampling, streaming=False):
        finish_reason = output.outputs[0].finish_reason
    if finish_reason != "length":
        raise EngineError(f"TensorRT-LLM's first request ended with finish reason {finish_reason!r}")


async def _watch_statistics(llm: Llm, site: Site) -> None:
    """Feed iteration statistics to whom they concern; the iterator ends whenever the engine idles."""
    while True:
        async for statistics in llm.get_stats_async(timeout=STATISTICS_IDLE_S):
            site.book.observe(statistics, now_s())
            if site.metrics is not None:
                site.metrics.note_iteration(statistics)
        await asyncio.sleep(STATISTICS_PAUSE_S)


async def _watch_kv_events(llm: Llm, book: KvEventBook, site: Site) -> None:
    """Emit what changes in the engine's prefix cache; the iterator ends whenever nothing does."""
    while True:
        async for event in llm.get_kv_cache_events_async(timeout=EVENTS_IDLE_S):
            if changes := book.take(event):
                site.ticks.add([CacheChanged(changes=changes)])
            site.book.num_cached_blocks = book.num_blocks
        await asyncio.sleep(EVENTS_PAUSE_S)


def _known_kv_timeout_s(llm: Llm) -> float:
    timeout_s = kv_timeout_s(llm.args)
    if timeout_s is None and llm.args.cache_transceiver_config is not None:
        logger.warning(
            "kv_transfer_timeout_ms isn't set in cache_transceiver_config: KV that no decode worker fetches may stay "
            "pinned for ever"
        )
    return DEFAULT_KV_TIMEOUT_S if timeout_s is None else timeout_s
