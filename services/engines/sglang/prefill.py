"""The prefill leg: it waits for its decode leg, then SGLang computes the prompt and delivers the KV meanwhile."""

import asyncio
import time

from schemas.errors import (
    AbortedError,
    BuswayError,
    LeaseExpiredError,
    RequestError,
    UnavailableError,
    WorkerLostError,
)
from schemas.frames import Timings
from schemas.handoff import BootstrapInfo
from schemas.hop import PrefillDone, PrefillFailed, PrefillRequest
from schemas.ids import Epoch, WorkerId
from schemas.peer import Landed, MeetRequest, Verdict
from services.engines.prompt import num_prompt_tokens, prompt_digest, prompt_ids
from services.engines.sglang.sampling import sampling_values
from services.engines.sglang.site import Site
from services.engines.sglang.words import Output, PromptStats, Submission, fresh_rid


class PrefillLeg:
    """One prefill leg. SGLang hears of it when decode has shown up: until then nothing is held.

    SGLang answers once, when decode has the whole KV: there is no result before the handoff is over.
    """

    def __init__(self, site: Site, leg: PrefillRequest, bootstrap: BootstrapInfo) -> None:
        self.attempt_id = leg.request.attempt_id
        self._site = site
        self._request = leg.request
        self._bootstrap = bootstrap
        self._rid = fresh_rid()
        self._unmet: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Await decode in the room. Raises UnavailableError for a room that isn't at this worker, RequestError for one
        that was used."""
        site, request, bootstrap = self._site, self._request, self._bootstrap
        if (bootstrap.prefill_worker, bootstrap.epoch) != (site.worker, site.epoch):
            raise UnavailableError("that room is of another worker or epoch")
        if bootstrap.endpoint != site.spec.endpoint:
            raise RequestError("that room is at another endpoint than this worker's", param="bootstrap")
        site.rooms.open(request.attempt_id, bootstrap.room, prompt_digest(request))
        site.legs[request.attempt_id] = self
        self._wait(LeaseExpiredError("decode didn't come for the KV"))

    def meet(self, request: MeetRequest) -> Verdict:
        """Decode is here: begin. Asked again, say whether the leg is still good."""
        try:
            is_news = self._site.rooms.meet(request)
        except BuswayError as error:
            return Verdict(is_good=False, error=error.record())
        if is_news:
            self._stop_waiting()
            self._submit()
            if self._site.rooms.decode_of(self.attempt_id) not in self._site.peers:
                self._wait(WorkerLostError(f"decode worker {request.decode_worker} shows no life", phase="transfer"))
        return Verdict(is_good=True)

    def take(self, output: Output) -> None:
        """See Leg."""
        if output.error is not None:
            self.abort(output.error)
        elif output.finish is not None:
            self._count(output)
            self._tell_landed(output)
            self._site.rooms.delivered(self.attempt_id, time.monotonic())
            self._leave()
            self._site.ticks.add([self._done(output.prompt or PromptStats())])

    def abort(self, error: BuswayError | None) -> None:
        """See Leg."""
        decode = self._site.rooms.decode_of(self.attempt_id)
        self._end(error)
        if decode is not None:
            why = error or AbortedError("the request was aborted")
            self._site.tell_stranded(decode[0], self.attempt_id, why)

    def stranded(self, error: BuswayError) -> None:
        """See Leg."""
        self._end(error)

    def landed(self, message: Landed) -> None:
        """See Leg. That is prefill's to tell."""

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Leg."""
        if self._site.rooms.decode_of(self.attempt_id) == (worker, epoch):
            self._stop_waiting()

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Leg."""
        if self._site.rooms.decode_of(self.attempt_id) == (worker, epoch):
            self._end(WorkerLostError(f"decode worker {worker} is gone", phase="transfer"))

    def is_running(self) -> bool:
        """See Leg."""
        return False

    def num_queued_tokens(self) -> int:
        """See Leg."""
        return num_prompt_tokens(self._request)

    def _submit(self) -> None:
        request, site = self._request, self._site
        site.submit(
            self,
            Submission(
                rid=self._rid,
                token_ids=prompt_ids(request),
                sampling=sampling_values(request, site.limits),
                num_logprobs=request.num_logprobs,
                cache_salt=request.cache_salt,
                priority=request.priority,
                room=self._bootstrap.room,
                endpoint=self._bootstrap.endpoint,
            ),
        )

    def _tell_landed(self, output: Output) -> None:
        prompt, decode = output.prompt or PromptStats(), self._site.rooms.decode_of(self.attempt_id)
        if decode is not None and output.token_ids:
            landed = Landed(
                attempt_id=self.attempt_id,
                room=self._bootstrap.room,
                first_token_id=output.token_ids[0],
                num_bytes=prompt.num_bytes,
                prefill_queue_s=prompt.queue_s,
                prefill_s=prompt.prefill_s,
            )
            self._site.tell_landed(decode[0], landed)

    def _done(self, prompt: PromptStats) -> PrefillDone:
        timings = Timings(prefill_queue_s=prompt.queue_s, prefill_s=prompt.prefill_s, kv_bytes=prompt.num_bytes)
        return PrefillDone(attempt_id=self.attempt_id, params=self._bootstrap, timings=timings)

    def _end(self, error: BuswayError | None) -> None:
        self._site.rooms.failed(self.attempt_id, error, time.monotonic())
        self._leave()
        self._site.abort(self._rid)
        if error is not None:
            self._site.ticks.add([PrefillFailed(attempt_id=self.attempt_id, error=error.record())])

    def _leave(self) -> None:
        self._stop_waiting()
        self._site.legs.pop(self.attempt_id, None)

    def _wait(self, error: BuswayError) -> None:
        """Abort in a lease's time, for this reason, unless what is waited for comes."""
        self._unmet = asyncio.get_running_loop().call_later(self._site.lease_s, self.abort, error)

    def _stop_waiting(self) -> None:
        if self._unmet is not None:
            self._unmet.cancel()
            self._unmet = None

    def _count(self, output: Output) -> None:
        totals = self._site.totals
        totals.num_prompt_tokens += num_prompt_tokens(self._request)
        totals.num_cached_tokens += output.num_cached_tokens
        totals.num_generated_tokens += 1
        if output.prompt is not None:
            totals.num_transfer_bytes += output.prompt.num_bytes
