"""PrefillRouter: takes requests from the queue group `router`, acks them, and keeps their journeys. Step 2 of the walk.

Never on the token path: its part ends when decode acks; it remembers where an attempt went, so that a late abort, a
failing background prefill or a dying worker still reaches both legs.
"""

import asyncio
import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

import msgspec

from bus.connection import Bus
from bus.deadlines import check_deadlines
from bus.serving import Call
from bus.subjects import is_under_inbox, slug
from schemas.errors import CapacityError, RequestError, StreamBrokenError, UnavailableError
from schemas.explanation import ExplainRequest, Explanation
from schemas.hop import Abort, AcceptedHop, Ok, PrefillDone, PrefillFailed, PrefillResult, Resend
from schemas.ids import ATTEMPT_ID_LENGTH, AttemptId, Epoch, WorkerId
from schemas.message import decode, encode
from schemas.request import GenerateRequest
from schemas.trace_context import continued, well_formed
from schemas.worker import LoadReport, ServiceRecord
from services.config import RouterConfig
from services.log_context import log_about, names_of
from services.router.dispatch import Dispatcher, Workers
from services.router.journey import Journey
from services.router.kv_desk import KvDesk
from services.router.kv_policy import KvSettings
from services.router.kv_routing import KvMemory
from services.router.loads import LoadBook
from services.router.local_prefill import LocalSettings
from services.router.policies import Picker
from services.router.route_words import AbortAsked, RequestFailed, WorkerLeft

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 8192
LAST_WORDS_S = 0.05
_ATTEMPT_ID = re.compile(rf"[A-Za-z0-9_-]{{{ATTEMPT_ID_LENGTH}}}")


class PrefillRouter:
    """The requests of one router process. `num_routed` counts them since the start."""

    def __init__(self, bus: Bus, config: RouterConfig, workers: Workers, record: ServiceRecord) -> None:
        self.num_routed = 0
        self.id = record.id
        self.epoch: Epoch = record.epoch
        self.result_subject = f"{bus.inbox}.prefilled-{slug(record.id)}"
        self._bus = bus
        self._config = config
        self.kv = _kv_desk(config)
        self.book = LoadBook(record.epoch)
        self._dispatcher = Dispatcher(
            bus.subjects,
            workers,
            Picker(config.policy),
            self.book,
            router=record.id,
            epoch=record.epoch,
            is_strict=config.is_strict,
            result_subject=self.result_subject,
            kv=self.kv,
            max_ttft_s=config.kv_max_ttft_s,
        )
        self.tally = self._dispatcher.tally
        self._travelling: dict[AttemptId, Journey] = {}
        self._remembered: OrderedDict[AttemptId, Journey] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_travelling(self) -> int:
        """Requests that this router holds now."""
        return len(self._travelling)

    async def on_request(self, request: GenerateRequest, call: Call) -> AcceptedHop | None:
        """Take a request: ack it at once, route it in a task of its own. One without a usable trace context begins a
        trace.

        Raises what its sender shall hear instead of an ack: RequestError, DeadlineError (too late already),
        UnavailableError, CapacityError.
        """
        accepted = AcceptedHop(by=self.id, epoch=self.epoch)
        if self._find(request.attempt_id) is not None:
            return accepted  # a duplicate: it is held
        if not _ATTEMPT_ID.fullmatch(request.attempt_id):  # engines that abort by prefix would end others' requests
            raise RequestError(f"attempt_id: {ATTEMPT_ID_LENGTH} of [A-Za-z0-9_-] are wanted", param="attempt_id")
        if call.subject != self._bus.subjects.requests(request.model):
            raise RequestError("the model isn't the subject's", param="model")
        if not is_senders(request.stream.subject, call.reply):
            raise RequestError("the stream must lie under its sender's inbox", param="stream.subject")
        if abs(request.priority) > self._config.max_priority:
            limit = self._config.max_priority
            raise RequestError(f"priority: {request.priority} isn't within -{limit} and {limit}", param="priority")
        check_deadlines(request.deadlines, "accepted", time.time())
        if not well_formed(request.traceparent):
            request = msgspec.structs.replace(request, traceparent=continued("", request.request_id))
        log_about(names_of(request))
        try:
            path = self._dispatcher.path(request)
        except CapacityError as error:
            self._dispatcher.refused(request, error)
            raise
        journey = Journey(
            self._bus,
            self._dispatcher,
            request,
            path,
            router=self.id,
            ack_timeout_s=self._config.ack_timeout_s,
            max_tries=self._config.max_dispatch_tries,
        )
        self._travelling[request.attempt_id] = journey
        self._idle.clear()
        self.num_routed += 1
        self._bus.spawn(self._travel(request.attempt_id, journey, call, accepted), f"route {request.attempt_id}")
        return None

    async def on_explain(self, request: ExplainRequest, call: Call) -> Explanation:
        """Tell why a request went where it went."""
        return self._dispatcher.explanations.explain(request.id, router=self.id, policy=self._config.policy)

    async def on_abort(self, abort: Abort, call: Call) -> Ok | None:
        """Abort an attempt wherever it went; unknown ones are somebody else's."""
        journey = self._find(abort.attempt_id)
        if journey is not None:
            log_about(journey.names)
            logger.debug("aborted: %s", abort.reason)
            journey.post(AbortAsked(abort.reason, abort.error))
            self._dispatcher.prefill_over(abort.attempt_id)  # the worker has no result to tell of it
        return Ok() if call.reply else None

    async def on_resend(self, resend: Resend, call: Call) -> AcceptedHop:
        """Say who holds an attempt: this router, which has sent nothing that could be missing, or decode. Raises
        StreamBrokenError when nobody does, as far as is known here."""
        journey = self._find(resend.attempt_id)
        if journey is None or journey.route.stage == "ended":
            raise StreamBrokenError(f"router {self.id} knows no holder of that attempt")
        return AcceptedHop(by=journey.holder or self.id, epoch=self.epoch)

    def on_result(self, subject: str, payload: bytes) -> None:
        """Take a prefill leg's outcome; one that nobody waits for is given back."""
        result = cast("PrefillResult", decode(payload, cast("type[object]", PrefillResult)))
        self._dispatcher.prefill_over(result.attempt_id, is_done=not isinstance(result, PrefillFailed))
        journey = self._find(result.attempt_id)
        if journey is not None:
            journey.post(result)
        elif isinstance(result, PrefillDone) and result.params.prefill_worker:
            abort = encode(Abort(attempt_id=result.attempt_id, reason="nobody waits for this prefill"))
            target = self._bus.subjects.worker(result.params.prefill_worker, "abort")
            self._bus.spawn(self._bus.publish(target, abort), "abort of an orphan")

    def on_load(self, subject: str, payload: bytes) -> None:
        """Take a worker's load report."""
        report = decode(payload, LoadReport)
        self.book.report(report, time.monotonic())
        if self.kv is not None:
            self.kv.on_report(report, report.dispatched.get(str(self.epoch), 0))

    def worker_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """A worker is gone, or begins anew: nothing that was on it is any more."""
        self._dispatcher.forget(worker)
        self._bus.spawn(self._judge(WorkerLeft(worker, epoch)), f"judge {worker}")

    def owner_left(self, owner: str) -> None:
        """The process that wanted these requests' streams is gone."""
        for journey in self._all():
            if journey.owner == owner:
                journey.post(AbortAsked("the owner is gone"))

    async def wait_idle(self) -> None:
        """Return once this router holds no request."""
        await self._idle.wait()

    def give_up(self) -> None:
        """Fail what is still travelling: this router has to leave, another may route it anew."""
        leaving = UnavailableError("the router is leaving", retry_after_s=0.0).record()
        for journey in list(self._travelling.values()):
            journey.post(RequestFailed(leaving))

    async def _travel(self, attempt_id: AttemptId, journey: Journey, call: Call, accepted: AcceptedHop) -> None:
        try:
            await call.respond(accepted)
            await journey.run()
        finally:
            self._remembered[attempt_id] = self._travelling.pop(attempt_id)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            if not self._travelling:
                self._idle.set()

    async def _judge(self, left: WorkerLeft) -> None:
        """End what the worker held, after a moment for its last words: results, acks and the fleet's news come by
        different subscriptions, whose order among themselves is nobody's promise."""
        await asyncio.sleep(LAST_WORDS_S)
        for journey in self._all():
            if journey.touches(left.worker):
                journey.post(left)

    def _find(self, attempt_id: AttemptId) -> Journey | None:
        return self._travelling.get(attempt_id) or self._remembered.get(attempt_id)

    def _all(self) -> Iterator[Journey]:
        yield from list(self._travelling.values())
        yield from list(self._remembered.values())


def is_senders(stream_subject: str, reply: str) -> bool:
    """Return whether a stream lies under its sender's inbox.

    NATS clients with one subscription for all replies put two tokens under their inbox (nats-py 2.16's request:
    {inbox}.{client}.{number}), others one.
    """
    return is_under_inbox(stream_subject, reply) or is_under_inbox(stream_subject, reply.rpartition(".")[0])


def _kv_desk(config: RouterConfig) -> KvDesk | None:
    if config.policy != "kv":
        return None
    return KvDesk(
        KvSettings(
            temperature_s=config.kv_temperature_s,
            local=LocalSettings(
                is_on=config.kv_local_prefill,
                max_tokens=config.kv_max_local_tokens,
                max_stolen_tokens=config.kv_max_stolen_tokens,
            ),
        ),
        KvMemory(max_blocks=config.kv_index_blocks, routed_ttl_s=config.kv_routed_ttl_s),
        random.Random(),
    )
