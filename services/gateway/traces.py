"""The newest requests of this gateway, for whoever asks where their time went. Bounded; nothing is computed before."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter

from bus.serving import Call
from schemas.trace import Trace, TraceRequest
from services.gateway.exchange import Exchange

MAX_REQUESTS = 2048
MAX_COMPLETIONS = 4096
"""About 2 KiB each."""

ID_PREFIXES = ("chatcmpl-", "cmpl-")

OnEnd = Callable[[Trace, str], None]


class TraceLog:
    """Requests under way, and those that ended last: as many as both limits allow. `on_end`, when there is one, gets
    each that ended and its trace context."""

    def __init__(
        self, gateway: str, *, max_requests: int = MAX_REQUESTS, max_completions: int = MAX_COMPLETIONS
    ) -> None:
        self.on_end: OnEnd | None = None
        self._gateway = gateway
        self._max_requests = max_requests
        self._max_completions = max_completions
        self._running: set[Exchange] = set()
        self._ended: deque[Exchange] = deque()
        self._num_completions = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def begin(self, exchange: Exchange) -> None:
        """A request has come."""
        self._running.add(exchange)

    def end(self, exchange: Exchange) -> None:
        """It is over, and kept until others take its place."""
        self._running.discard(exchange)
        self._ended.append(exchange)
        self._num_completions += len(exchange.phases)
        while len(self._ended) > self._max_requests or self._num_completions > self._max_completions:
            self._num_completions -= len(self._ended.popleft().phases)
        if self.on_end is not None:
            self.on_end(self._trace(exchange), exchange.caller.traceparent)

    async def on_trace(self, request: TraceRequest, call: Call) -> Trace:
        """Tell where a request's time went, or, without a request's name, that it isn't known here."""
        return self.find(request.id)

    def find(self, id: str) -> Trace:
        """Return the newest request that goes by a name: its own id or its answer's, its client's label, its trace's,
        or one of its attempts'."""
        for prefix in ID_PREFIXES:
            id = id.removeprefix(prefix)
        found = next((exchange for exchange in self._newest_first() if _goes_by(exchange, id)), None)
        return Trace(gateway=self._gateway) if found is None else self._trace(found)

    def _newest_first(self) -> Iterator[Exchange]:
        yield from sorted(self._running, key=lambda one: -one.caller.received_at)
        yield from reversed(self._ended)

    def _trace(self, exchange: Exchange) -> Trace:
        now, caller = perf_counter(), exchange.caller
        return Trace(
            gateway=self._gateway,
            request_id=caller.request_id,
            label="" if caller.label == caller.request_id else caller.label,
            trace_id=caller.trace_id,
            parent_id=caller.parent_id,
            endpoint=exchange.endpoint,
            model=exchange.model or "",
            outcome="running" if exchange.ended_at is None else exchange.outcome,
            error=exchange.error,
            is_stream=exchange.is_stream,
            arrived_at=time.time() - (now - caller.received_at),
            total_s=exchange.seconds,
            num_prompt_tokens=exchange.prompt_tokens,
            completions=tuple(phases.trace(now) for phases in exchange.phases),
        )


def _goes_by(exchange: Exchange, id: str) -> bool:
    caller = exchange.caller
    return id in (caller.request_id, caller.label, caller.trace_id) or any(
        phases.has_attempt(id) for phases in exchange.phases
    )
