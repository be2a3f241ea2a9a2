"""The decode leg: meet prefill's leg over the bus, then let SGLang receive the KV and generate; or, on a worker of role
`both`, generate from the prompt.

SGLang's decode hands out prefill's first token as its own first, so everything the client sees comes from here.
"""

import asyncio
import time

from schemas.errors import (
    AbortedError,
    BusError,
    BuswayError,
    CapacityError,
    EngineError,
    KvTransferFailedError,
    WorkerLostError,
    error_from,
)
from schemas.frames import Timings, Usage
from schemas.handoff import BootstrapInfo
from schemas.hop import DecodeRequest
from schemas.ids import Epoch, WorkerId
from schemas.peer import Landed, MeetRequest, Verdict
from services.engines.adapter.frames import CompletionFrames, usage_of
from services.engines.prompt import num_prompt_tokens, prompt_digest, prompt_ids
from services.engines.protocol import EngineEvent
from services.engines.sglang.sampling import sampling_values
from services.engines.sglang.site import RETRY_GAP_S, Site
from services.engines.sglang.words import Output, Submission, fresh_rid


class DecodeLeg:
    """One decode leg; without `bootstrap` it computes its prompt."""

    def __init__(self, site: Site, leg: DecodeRequest, bootstrap: BootstrapInfo | None) -> None:
        self.attempt_id = leg.request.attempt_id
        self._site = site
        self._leg = leg
        self._request = leg.request
        self._bootstrap = bootstrap
        self._rid = fresh_rid()
        self._frames = CompletionFrames(leg.request)
        self._num_cached_tokens = 0
        self._began_at = time.monotonic()
        self._first_token_at: float | None = None
        self._landed: Landed | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Submit it, when its KV is to come from prefill once that has agreed."""
        self._site.legs[self.attempt_id] = self
        if self._bootstrap is None:
            self._submit()
        else:
            self._watch = self._site.spawn(self._meet(self._bootstrap), f"meet {self.attempt_id}")

    def take(self, output: Output) -> None:
        """See Leg."""
        events: list[EngineEvent] = []
        if output.token_ids and self._first_token_at is None:
            self._note_first(output)
            events.append(self._frames.begun(self._timings(), self._usage().cached_tokens))
        if output.token_ids:
            events.append(self._frames.tokens(output.token_ids, output.logprobs))
            self._site.totals.num_generated_tokens += len(output.token_ids)
        self._site.ticks.add(events)
        error = output.error or self._cut_short(output)
        if error is not None:
            self._lose(error)
        elif output.finish is not None:
            finished = self._frames.finished(output.finish, self._usage(), self._timings())
            self._leave()
            self._site.ticks.add([finished])

    def abort(self, error: BuswayError | None) -> None:
        """See Leg."""
        self._tell_peer(error or AbortedError("the request was aborted"))
        self._end(error)

    def refuse(self, error: BuswayError) -> None:
        """It never gets to the engine: prefill needn't wait for it."""
        self._tell_peer(error)

    def stranded(self, error: BuswayError) -> None:
        """See Leg. With the first token all of the KV is here: whatever happens to prefill is no concern any more."""
        if self._first_token_at is None:
            self._end(_as_loss(error))

    def landed(self, message: Landed) -> None:
        """See Leg. May come after the first tokens."""
        self._landed = message

    def peer_joined(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Leg. Prefill was chosen by who knows it."""

    def peer_left(self, worker: WorkerId, epoch: Epoch) -> None:
        """See Leg."""
        bootstrap = self._bootstrap
        if bootstrap is not None and (bootstrap.prefill_worker, bootstrap.epoch) == (worker, epoch):
            self.stranded(WorkerLostError(f"prefill worker {worker} is gone", phase="transfer"))

    def is_running(self) -> bool:
        """See Leg."""
        return self._first_token_at is not None

    def num_queued_tokens(self) -> int:
        """See Leg."""
        is_computed_here = self._bootstrap is None and self._first_token_at is None
        return num_prompt_tokens(self._request) if is_computed_here else 0

    async def _meet(self, bootstrap: BootstrapInfo) -> None:
        """Agree with prefill; then ask again now and then until the first token is here, for the word that prefill's
        leg has failed may be lost."""
        site = self._site
        message = MeetRequest(
            attempt_id=self.attempt_id,
            room=bootstrap.room,
            epoch=bootstrap.epoch,
            decode_worker=site.worker,
            decode_epoch=site.epoch,
            num_tokens=num_prompt_tokens(self._request),
            prompt_digest=prompt_digest(self._request),
            block_ids=(),
        )
        try:
            async with asyncio.timeout(site.lease_s):
                await self._agreed(message)
            self._submit()
            while True:
                await asyncio.sleep(site.lease_s / 3)
                await self._agreed(message)
        except TimeoutError:
            self._lose(WorkerLostError(f"prefill worker {bootstrap.prefill_worker} doesn't answer", phase="transfer"))
        except BuswayError as error:
            self._lose(_as_loss(error))

    async def _agreed(self, message: MeetRequest) -> None:
        """Return when prefill says that its leg is good; raises what it says otherwise. Its silence says nothing: that
        its process is gone is told by `peer_left`."""
        assert self._bootstrap is not None
        while True:
            try:
                verdict = await self._site.link.ask(self._bootstrap.prefill_worker, message, Verdict)
            except (BusError, CapacityError):
                await asyncio.sleep(RETRY_GAP_S)
                continue
            if verdict.error is not None:
                raise error_from(verdict.error)
            return

    def _submit(self) -> None:
        request, site, bootstrap = self._request, self._site, self._bootstrap
        site.submit(
            self,
            Submission(
                rid=self._rid,
                token_ids=prompt_ids(request),
                sampling=sampling_values(request, site.limits),
                num_logprobs=request.num_logprobs,
                cache_salt=request.cache_salt,
                priority=request.priority,
                room=None if bootstrap is None else bootstrap.room,
                endpoint=None if bootstrap is None else bootstrap.endpoint,
            ),
        )

    def _note_first(self, output: Output) -> None:
        self._first_token_at = time.monotonic()
        self._num_cached_tokens = output.num_cached_tokens
        self._stop_watch()
        totals = self._site.totals
        if self._bootstrap is not None:
            totals.num_remote_prefills += 1
        else:
            totals.num_prompt_tokens += num_prompt_tokens(self._request)
            totals.num_cached_tokens += output.num_cached_tokens

    def _lose(self, error: BuswayError) -> None:
        """The engine failed on it, or prefill did."""
        if self._bootstrap is not None and self._first_token_at is None:
            error = _as_loss(error)
            self._tell_peer(error)
        self._end(error)

    def _end(self, error: BuswayError | None) -> None:
        self._leave()
        self._site.abort(self._rid)
        if error is not None:
            self._site.ticks.add([self._frames.failed(error)])

    def _leave(self) -> None:
        self._stop_watch()
        self._site.legs.pop(self.attempt_id, None)

    def _stop_watch(self) -> None:
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()

    def _tell_peer(self, error: BuswayError) -> None:
        if self._bootstrap is not None and self._first_token_at is None:
            self._site.tell_stranded(self._bootstrap.prefill_worker, self.attempt_id, error)

    def _cut_short(self, output: Output) -> BuswayError | None:
        """Return an error for a completion that SGLang ended before its length, as it does where its pool is small."""
        num_tokens, max_tokens = self._frames.num_tokens, self._request.stop.max_tokens
        if output.finish != "length" or num_tokens >= max_tokens:
            return None
        return EngineError(f"SGLang cut the completion short: {num_tokens} of {max_tokens} tokens")

    def _usage(self) -> Usage:
        is_remote = self._bootstrap is not None
        return usage_of(self._request, self._frames.num_tokens, self._num_cached_tokens, is_remote=is_remote)

    def _timings(self) -> Timings:
        """Return the phases. What isn't prefill's, as far as that is known by now, was transfer."""
        first_token_at = self._first_token_at or time.monotonic()
        waited_s, decode_s = first_token_at - self._began_at, time.monotonic() - first_token_at
        if self._bootstrap is None:
            return Timings(prefill_s=waited_s, decode_s=decode_s)
        queue_s, prefill_s = 0.0, 0.0
        if self._landed is not None:
            queue_s, prefill_s = self._landed.prefill_queue_s, self._landed.prefill_s
        spec = self._site.spec
        return Timings(
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=max(0.0, waited_s - queue_s - prefill_s),
            decode_s=decode_s,
            kv_bytes=self._site.limits.num_blocks_for(num_prompt_tokens(self._request)) * spec.kv_bytes_per_block,
        )


def _as_loss(error: BuswayError) -> BuswayError:
    """Return what a peer's word means here: that prefill was given up over there is no abort of the request."""
    if isinstance(error, AbortedError | EngineError):
        return KvTransferFailedError(f"no KV from prefill: {error.message}", phase="transfer")
    return error
