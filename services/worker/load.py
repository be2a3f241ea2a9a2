"""The worker's load reports: soon after each admission and end, and twice a second."""

import asyncio
import contextlib

from bus.connection import Bus
from schemas.errors import BusUnavailableError
from schemas.hop import Dispatch
from schemas.ids import Epoch, WorkerId
from schemas.message import encode
from schemas.worker import LoadReport
from services.engines.protocol import Engine
from services.worker.kv_teller import KvTeller

COALESCE_S = 0.005
PERIOD_S = 0.5
MAX_ROUTER_EPOCHS = 64


class LoadReporter:
    """Publishes reports; routers add to them only their dispatches above the number counted here."""

    def __init__(self, bus: Bus, engine: Engine, kv: KvTeller, *, model: str, worker: WorkerId, epoch: Epoch) -> None:
        self._bus = bus
        self._engine = engine
        self._kv = kv
        self._subject = bus.subjects.load(model, worker)
        self._worker = worker
        self._epoch = epoch
        self._dispatched: dict[str, int] = {}
        self._has_news = asyncio.Event()

    def count(self, dispatch: Dispatch) -> None:
        """A dispatch has arrived, whatever becomes of it: what it adds to the load is in the next report."""
        key = str(dispatch.epoch)
        self._dispatched[key] = max(dispatch.number, self._dispatched.get(key, 0))
        if len(self._dispatched) > MAX_ROUTER_EPOCHS:
            del self._dispatched[min(self._dispatched, key=int)]
        self._has_news.set()

    def nudge(self) -> None:
        """The load has changed."""
        self._has_news.set()

    def report(self) -> LoadReport:
        """Return the load now."""
        load = self._engine.load()
        return LoadReport(
            worker_id=self._worker,
            epoch=self._epoch,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_cached=load.kv_blocks_cached,
            kv_blocks_total=load.kv_blocks_total,
            kv_blocks_quarantined=load.kv_blocks_quarantined,
            queued_prefill_tokens=load.queued_prefill_tokens,
            pass_tokens=load.pass_tokens,
            pass_age_s=load.pass_age_s,
            prefill_cost=load.prefill_cost,
            transfer_cost=load.transfer_cost,
            last_kv_event=self._kv.published_id,
            dispatched=dict(self._dispatched),
            kv_transfer_bytes=load.kv_transfer_bytes,
            num_remote_prefills=load.num_remote_prefills,
            num_recomputed_tokens=load.num_recomputed_tokens,
            num_prompt_tokens=load.num_prompt_tokens,
            num_cached_tokens=load.num_cached_tokens,
            num_generated_tokens=load.num_generated_tokens,
        )

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._has_news.wait()
                    await asyncio.sleep(COALESCE_S)
            self._has_news.clear()
            if self._bus.is_connected:  # an old report told after an outage would be believed
                with contextlib.suppress(BusUnavailableError):
                    await self._bus.publish(self._subject, encode(self.report()))
