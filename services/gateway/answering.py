"""The request boundary: every outcome gets its last word, its metrics and its one log line.

The last word is an answer, an error in OpenAI's form, or nothing for a caller that has gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from schemas.errors import BuswayError, DeadlineError, UnavailableError
from services.gateway.exchange import Caller, Exchange
from services.gateway.metrics import UNKNOWN_MODEL, GatewayMetrics
from services.gateway.openai_request import Endpoint
from services.gateway.reply import Reply
from services.gateway.traces import TraceLog
from services.gateway.walk import Walk
from services.log_context import logging_about

logger = logging.getLogger(__name__)

ReadBody = Callable[[], Awaitable[bytes]]

# What a last write to a stuck caller may take.
_LAST_WORD_S = 1.0


class Answering:
    """All requests of a gateway, whatever carried them. `num_in_flight` are being answered."""

    def __init__(self, walk: Walk, metrics: GatewayMetrics, traces: TraceLog, *, request_timeout_s: float) -> None:
        self.is_draining = False
        self._walk = walk
        self._metrics = metrics
        self._traces = traces
        self._request_timeout_s = request_timeout_s
        self._guards: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_in_flight(self) -> int:
        return len(self._guards)

    async def answer(self, endpoint: Endpoint, read_body: ReadBody, reply: Reply, caller: Caller) -> None:
        """Answer a request; raises nothing but CancelledError, which aborts its completions on the bus."""
        exchange = Exchange(endpoint, caller)
        with logging_about(caller.names), self._accounted(exchange):
            error = await self._attempt(exchange, read_body, reply)
            if error is not None:
                exchange.outcome, exchange.error = error.code, error.message
                await self._tell(error, await self._walk.asides(exchange), reply)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those in flight, and end with an error what is left after `timeout_s`."""
        self.is_draining = True
        if not await self._wait_idle(timeout_s):
            for guard in self._guards:
                guard.reschedule(asyncio.get_running_loop().time())
            await self._wait_idle(2 * _LAST_WORD_S)

    async def _attempt(self, exchange: Exchange, read_body: ReadBody, reply: Reply) -> BuswayError | None:
        """Return the error to tell the caller, None when all is told or nobody listens."""
        try:
            await self._run_guarded(exchange, read_body, reply)
            return None
        except BuswayError as error:
            return error
        except TimeoutError:
            if self.is_draining:
                return UnavailableError("the gateway is shutting down", phase="gateway")
            return DeadlineError(f"no complete answer within {self._request_timeout_s} s", phase="total")
        except ConnectionResetError:
            exchange.outcome = "aborted"
            return None
        except asyncio.CancelledError:
            exchange.outcome = "aborted"
            raise
        except Exception:
            logger.exception("the request failed")
            return BuswayError("internal error", phase="gateway")

    async def _tell(self, error: BuswayError, asides: Mapping[str, object], reply: Reply) -> None:
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await reply.fail(error, asides)
        except (ConnectionResetError, BuswayError) as unheard:
            logger.debug("caller can't be told of %s: %r", error.code, unheard)
        except TimeoutError:
            reply.abandon()

    async def _run_guarded(self, exchange: Exchange, read_body: ReadBody, reply: Reply) -> None:
        """Walk within the request's total deadline, which `drain` may bring forward.

        The bus client ends a late request itself; this also ends one whose caller takes no bytes.
        """
        if self.is_draining:
            raise UnavailableError("the gateway is shutting down", phase="gateway")
        if exchange.caller.fault is not None:
            raise exchange.caller.fault
        async with asyncio.timeout(self._request_timeout_s + _LAST_WORD_S) as guard:
            self._guards.add(guard)
            self._is_idle.clear()
            try:
                await self._walk.run(exchange, await read_body(), reply)
            finally:
                self._guards.discard(guard)
                if not self._guards:
                    self._is_idle.set()

    async def _wait_idle(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        return not self._guards

    @contextmanager
    def _accounted(self, exchange: Exchange) -> Iterator[None]:
        self._metrics.begin(exchange.endpoint)
        self._traces.begin(exchange)
        try:
            yield
        finally:
            exchange.end()
            self._traces.end(exchange)
            self._metrics.end(
                exchange.endpoint,
                exchange.model or UNKNOWN_MODEL,
                exchange.outcome,
                seconds=exchange.seconds,
                ttft_s=exchange.ttft_s,
            )
            if exchange.model is not None:
                self._metrics.phases(exchange.model, exchange.phases)
                self._metrics.count_tokens(
                    exchange.model,
                    prompt_tokens=exchange.prompt_tokens,
                    completion_tokens=exchange.completion_tokens,
                )
            logger.info("%s", exchange.line())
