"""The leg of an attempt: one request of the LLM, from its submission to the end of its iteration.

A leg has two ends. Its attempt's: the last event, or an abort; from then on it is muted. And the engine's: the
iteration ends. Between the two it drains: KV on its way can't be cancelled safely (PRs #12313, #13713 and others:
leaked blocks, wedged workers), so the abort of a generation phase waits for its first result.

A RequestError while iterating is that request's; anything else means that the executor has shut down [E], and is
raised out of the engine.
"""

import time
from abc import ABC, abstractmethod

from schemas.errors import BuswayError, EngineError
from schemas.request import GenerateRequest
from services.engines.adapter.faults import output_fault
from services.engines.prompt import num_prompt_tokens
from services.engines.protocol import EngineEvent
from services.engines.trtllm.api import RequestOutput
from services.engines.trtllm.completion import Completion, LogprobRow
from services.engines.trtllm.site import Site


class Leg(ABC):
    """A leg; `start` it once."""

    def __init__(self, site: Site, request: GenerateRequest) -> None:
        self.site = site
        self.request = request
        self.is_muted = False
        self.started = time.monotonic()
        self.output: RequestOutput
        self._has_aborted = False

    @property
    def num_tokens(self) -> int:
        """See LiveLeg."""
        return num_prompt_tokens(self.request)

    @property
    def num_queued_tokens(self) -> int:
        """See LiveLeg."""
        return 0

    @abstractmethod
    def submit(self) -> RequestOutput:
        """Hand the request to the engine; raises RequestError or EngineError."""

    @abstractmethod
    def take(self, output: RequestOutput) -> None:
        """Take a result; only while the attempt is open."""

    @abstractmethod
    def failed(self, error: BuswayError) -> EngineEvent:
        """Return the attempt's last event for an error."""

    @property
    def may_abort(self) -> bool:
        """Whether the engine can be told to abort now without harm."""
        return True

    def start(self) -> None:
        """Submit and follow the request."""
        self.output = self.submit()
        self.site.legs[self.request.attempt_id] = self
        self.site.follow(self._follow(), f"trtllm-{self.request.attempt_id}")

    def close(self, *events: EngineEvent) -> None:
        """End the attempt with its last events; the engine's request drains, if it hasn't ended."""
        if self.is_muted:
            return
        self.is_muted = True
        self.site.ticks.add(events)
        if self.site.legs.get(self.request.attempt_id) is self:
            del self.site.legs[self.request.attempt_id]
        self.site.draining.add(self)

    def abort(self, error: BuswayError | None) -> None:
        """Give the attempt up, with a last event if there is an error."""
        self.close(*([] if error is None else [self.failed(error)]))
        self._abort_engine()

    def refused(self, error: str) -> None:
        """The engine failed on this request."""
        self.close(self.failed(EngineError(f"TensorRT-LLM failed on the request: {error}")))

    @abstractmethod
    def landed(self, output: RequestOutput) -> None:
        """Note a result, also of a muted leg."""

    async def _follow(self) -> None:
        try:
            await self._iterate()
            if not self.is_muted:
                self.close(self.failed(EngineError("TensorRT-LLM ended the request without a last result")))
        finally:
            self.site.draining.discard(self)

    async def _iterate(self) -> None:
        try:
            async for output in self.output:
                self.site.book.num_results += 1
                if self.site.metrics is not None:
                    self.site.metrics.note_result(output)
                self._take(output)
        except self.site.engine.api.request_error as error:
            self.refused(str(error))

    def _take(self, output: RequestOutput) -> None:
        try:
            self.landed(output)
            if not self.is_muted:
                self.take(output)
        except Exception as error:  # what one request's output has that can't be read is no reason to end the others
            self.close(self.failed(output_fault("TensorRT-LLM", self.request.attempt_id, error)))
        if self.is_muted:
            self._abort_engine()

    def _abort_engine(self) -> None:
        if self.may_abort and not self._has_aborted and not self.output.finished:
            self._has_aborted = True
            self.output.abort()


def completion_of(site: Site, request: GenerateRequest, row: LogprobRow | float | None = None) -> Completion:
    """Return the completion of a request, as yet empty."""
    limits = site.limits
    return Completion(
        max_tokens=request.stop.max_tokens - len(request.resume),
        stop_ids=limits.stop_ids(request),
        end_id=limits.eos_token_ids[0] if limits.eos_token_ids else None,
        num_logprobs=request.num_logprobs,
        first_row=row,
    )
