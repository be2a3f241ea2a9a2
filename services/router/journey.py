"""One request on its way: the I/O around its Route. Asks workers, hears their acks and results, carries out what the
route says, and is the request's error boundary: whatever goes wrong here, the stream gets its terminal frame.
"""

import asyncio
import logging
import time
from collections import deque

import msgspec

from bus.connection import Bus
from bus.deadlines import late
from schemas.errors import (
    AckTimeoutError,
    BusError,
    BusUnavailableError,
    BuswayError,
    CapacityError,
    NoRespondersError,
)
from schemas.frames import Accepted, Finished, Frame, Timings, encode_frames
from schemas.hop import Abort, AcceptedHop, Busy, PrefillRequest
from schemas.ids import WorkerId
from schemas.message import encode
from schemas.request import GenerateRequest
from schemas.worker import RuntimeConfig
from services.log_context import log_about, names_of
from services.phase_timings import NO_TIMINGS
from services.router.candidates import Path
from services.router.dispatch import Dispatcher, Hop
from services.router.lease_keeper import LeaseKeeper
from services.router.policies import Leg
from services.router.result_watch import ResultWatch
from services.router.route import Route
from services.router.route_words import (
    AbortLeg,
    Ask,
    Event,
    Instruction,
    LegAccepted,
    LegBusy,
    LegElsewhere,
    LegRefused,
    LegSent,
    LegSilent,
    RequestFailed,
    ResultLost,
    Say,
    StaysOnDecode,
)

logger = logging.getLogger(__name__)


class Journey:
    """`run` once; `post` events at any time, also long after: a late abort still finds the workers."""

    def __init__(
        self,
        bus: Bus,
        dispatcher: Dispatcher,
        request: GenerateRequest,
        path: Path,
        *,
        router: str,
        ack_timeout_s: float,
        max_tries: int,
    ) -> None:
        self.route = Route(request, path.handoff)
        self.owner = request.stream.owner
        self.names = names_of(request)
        self._began_at = time.monotonic()
        self._prefill_asked_at: float | None = None
        self._bus = bus
        self._dispatcher = dispatcher
        self._hops = _Hops()
        self._way: _Way | None = _Way(
            request=request, path=path, router=router, ack_timeout_s=ack_timeout_s, max_tries=max_tries
        )
        self._events: deque[Event] = deque()
        self._has_event = asyncio.Event()
        self._lease_keeper = LeaseKeeper(bus)
        self._result_watch = ResultWatch(
            bus,
            request.attempt_id,
            awaited_from=lambda: self._hops.workers.get("prefill") if self.route.awaits_result else None,
            on_lost=lambda: self.post(ResultLost()),
        )

    @property
    def is_over(self) -> bool:
        """Whether `run` has returned: from then on there are only late events."""
        return self._way is None

    @property
    def holder(self) -> WorkerId | None:
        """The decode worker, once it holds the request."""
        return self._hops.workers.get("decode") if self.route.stage == "handed_over" else None

    def touches(self, worker: WorkerId) -> bool:
        """Return whether a leg was sent to that worker."""
        return worker in self._hops.workers.values()

    def post(self, event: Event) -> None:
        """Take an event: something happened to the request, or its owner wants it gone."""
        if not self.is_over:
            self._events.append(event)
            self._has_event.set()
        elif instructions := self.route.handle(event):
            self._bus.spawn(self._carry_out_late(instructions), "late abort")

    async def run(self) -> None:
        """Route the request until decode holds it or it has ended."""
        try:
            self._result_watch.start()
            async with asyncio.TaskGroup() as hops:
                await self._travel(hops)
        except Exception as error:  # the request boundary: every outcome has its terminal frame
            await self._fail(error)
        finally:
            logger.debug("%s after %.1f ms", self.route.stage, (time.monotonic() - self._began_at) * 1000)
            self._result_watch.stop()
            self._lease_keeper.stop()
            self._way = None
            while self._events:
                self.post(self._events.popleft())

    async def _travel(self, hops: asyncio.TaskGroup) -> None:
        way = self._on_the_way
        await self._bus.publish(
            way.request.stream.subject, encode_frames([Accepted(self.route.attempt_id, way.router)])
        )
        await self._carry_out(self.route.start(), hops)
        while not self.route.is_settled:
            event = await self._next_event()
            await self._carry_out(self.route.handle(event), hops)

    async def _next_event(self) -> Event:
        """Wait for an event, at most until the deadline that counts now."""
        while not self._events:
            due = self.route.due()
            self._has_event.clear()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due.at - time.time())):
                    await self._has_event.wait()
            except TimeoutError:
                if due is not None:
                    return RequestFailed(late(due).record())
        return self._events.popleft()

    async def _carry_out(self, instructions: list[Instruction], hops: asyncio.TaskGroup) -> None:
        for instruction in instructions:
            match instruction:
                case Ask():
                    await self._ask(instruction, hops)
                case AbortLeg():
                    await self._abort(instruction)
                case Say(frames):
                    await self._say(frames)

    async def _say(self, frames: list[Frame]) -> None:
        """Publish frames to the request's stream; its end tells what routing took."""
        last = frames[-1]
        if isinstance(last, Finished):
            frames = [*frames[:-1], msgspec.structs.replace(last, timings=self._with_routing(last.timings))]
        await self._bus.publish(self._on_the_way.request.stream.subject, encode_frames(frames))

    def _with_routing(self, timings: Timings) -> Timings:
        """Return what is known of the time until now: what prefill doesn't claim is the router's and its messages'. A
        prefill that is under way (rendezvous) has claimed nothing yet, and all since it was asked is its."""
        if timings == NO_TIMINGS and self._prefill_asked_at is not None:
            timings = Timings(prefill_s=time.monotonic() - self._prefill_asked_at)
        route_s = time.monotonic() - self._began_at - timings.prefill_queue_s - timings.prefill_s
        return msgspec.structs.replace(timings, route_s=max(0.0, route_s))

    async def _ask(self, ask: Ask, hops: asyncio.TaskGroup) -> None:
        """Choose who gets a leg and send it; the answer comes as an event."""
        way = self._on_the_way
        if ask.leg == "prefill":
            self._prefill_asked_at = None
        ask = msgspec.structs.replace(ask, prefill_timings=self._with_routing(ask.prefill_timings))
        self._lease_keeper.keep(ask.params)
        compat = self._hops.compat if ask.leg == "decode" else ""
        try:
            if self._hops.count(ask.leg) >= way.max_tries:
                raise CapacityError(f"{way.max_tries} {ask.leg} workers were busy", phase="queue", retry_after_s=1.0)
            hop = self._dispatcher.choose(
                ask,
                way.request,
                way.path,
                tried=self._hops.tried(ask.leg),
                compat=compat,
                may_stay=not self._hops.count("decode"),
            )
        except BuswayError as error:
            self._dispatcher.refused(way.request, error)
            self.post(LegRefused(ask.leg, error.record()))
            return
        self._hops.sent(hop)
        self._dispatcher.sent(hop)
        if hop.leg == "prefill":
            self._prefill_asked_at = time.monotonic()
        if hop.leg != ask.leg:
            self.route.handle(StaysOnDecode())
        hops.create_task(self._send(hop, way.ack_timeout_s), name=f"{hop.leg} hop")
        self.route.handle(LegSent(hop.leg, hop.worker))

    async def _send(self, hop: Hop, ack_timeout_s: float) -> None:
        self.post(await self._outcome(hop, ack_timeout_s))

    async def _outcome(self, hop: Hop, ack_timeout_s: float) -> Event:
        """Send a hop and return what became of it."""
        try:
            ack = await self._bus.ask(hop.subject, hop.message, AcceptedHop | Busy, timeout_s=ack_timeout_s)
        except CapacityError:
            self._dispatcher.not_held(hop)
            return LegBusy(hop.leg)
        except NoRespondersError:  # gone, before the fleet has noticed
            self._dispatcher.not_held(hop, is_silent=True)
            return LegBusy(hop.leg)
        except (AckTimeoutError, BusUnavailableError):
            self._dispatcher.not_held(hop, is_silent=True)
            return LegSilent(hop.leg)
        except BuswayError as error:
            self._dispatcher.not_held(hop)
            return LegRefused(hop.leg, error.record())
        if isinstance(ack, Busy):
            self._dispatcher.not_held(hop)
            return LegBusy(hop.leg)
        if ack.is_duplicate:
            self._dispatcher.not_held(hop)
            return LegElsewhere(hop.leg)
        worker = WorkerId(ack.by)
        self._dispatcher.accepted(hop, worker)
        self._hops.accepted(hop.leg, worker)
        bootstrap = hop.message.bootstrap if isinstance(hop.message, PrefillRequest) else None
        return LegAccepted(hop.leg, worker, ack.epoch, bootstrap or ack.bootstrap)

    async def _abort(self, instruction: AbortLeg) -> None:
        abort = encode(Abort(attempt_id=self.route.attempt_id, reason=instruction.reason, error=instruction.error))
        for worker in self._where(instruction.leg):
            await self._bus.publish(self._bus.subjects.worker(worker, "abort"), abort)

    def _where(self, leg: Leg) -> list[WorkerId]:
        """Return who may hold a leg: one worker, or a whole queue group while nobody has said that it is he."""
        worker = self._hops.workers.get(leg)
        if worker is not None:
            return [worker]
        group = self._hops.groups.get(leg)
        return [] if group is None else self._dispatcher.members(group)

    async def _carry_out_late(self, instructions: list[Instruction]) -> None:
        log_about(self.names)
        for instruction in instructions:
            if isinstance(instruction, AbortLeg):
                await self._abort(instruction)

    async def _fail(self, error: Exception) -> None:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        known = next((cause for cause in causes if isinstance(cause, BuswayError)), None)
        if known is None:
            logger.error("routing of %s failed", self.route.attempt_id, exc_info=error)
        record = (known or BuswayError("the router failed on this request")).record()
        try:
            for instruction in self.route.handle(RequestFailed(record)):
                if isinstance(instruction, Say):
                    await self._say(instruction.frames)
                elif isinstance(instruction, AbortLeg):
                    await self._abort(instruction)
        except BusError as lost:
            logger.warning("the failure of %s could not be told: %s", self.route.attempt_id, lost.message)

    @property
    def _on_the_way(self) -> "_Way":
        if self._way is None:
            raise BuswayError("the journey is over")
        return self._way


class _Way(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed only while the router holds the request; the prompt among it."""

    request: GenerateRequest
    path: Path
    router: str
    ack_timeout_s: float
    max_tries: int


class _Hops:
    """Where the legs went: `workers` may hold theirs, `groups` got one and nobody has answered yet."""

    def __init__(self) -> None:
        self.workers: dict[Leg, WorkerId] = {}
        self.groups: dict[Leg, RuntimeConfig] = {}
        self.compat = ""
        self._sent: list[tuple[Leg, WorkerId | None]] = []

    def sent(self, hop: Hop) -> None:
        self._sent.append((hop.leg, hop.worker))
        if hop.leg == "prefill":
            self.compat = hop.config.compat
        if hop.worker is None:
            self.groups[hop.leg] = hop.config
        else:
            self.workers[hop.leg] = hop.worker

    def accepted(self, leg: Leg, worker: WorkerId) -> None:
        self.workers[leg] = worker
        self.groups.pop(leg, None)

    def count(self, leg: Leg) -> int:
        return sum(one == leg for one, _ in self._sent)

    def tried(self, leg: Leg) -> set[WorkerId]:
        return {worker for one, worker in self._sent if one == leg and worker is not None}
