"""What the caller of a request has got so far, over all its attempts: what the next one resumes from, whether it may,
and what the last frame says. Pure.
"""

from collections.abc import Set

import msgspec

from schemas.errors import BuswayError, WorkerLostError
from schemas.frames import Begun, Finished, FinishReason, Tokens, Usage
from schemas.ids import AttemptId, WorkerId
from schemas.request import Deadlines, GenerateRequest


class Delivered:
    """`end_ids` end a completion beside the request's own stop ids (EOS), as far as the caller knows them."""

    def __init__(self, request: GenerateRequest, end_ids: Set[int]) -> None:
        self.token_ids: list[int] = list(request.resume)
        self.is_inexact = False
        self._request = request
        self._end_ids = end_ids
        self._avoid: dict[WorkerId, None] = dict.fromkeys(request.avoid)
        self._num_given = len(request.resume)
        self._first_hit: int | None = None
        self._is_continued = False

    @property
    def has_begun(self) -> bool:
        """Whether the caller has got a token."""
        return len(self.token_ids) > self._num_given

    def begun(self, frame: Begun) -> None:
        """Note the prefix hit of whoever is about to give the first token."""
        if not self.has_begun:
            self._first_hit = frame.cached_tokens

    def add(self, frame: Tokens) -> None:
        self.token_ids += frame.token_ids

    def avoid(self, *workers: WorkerId | None) -> None:
        """Prefer others from now on."""
        self._avoid.update(dict.fromkeys(worker for worker in workers if worker is not None))

    def next_request(self, attempt_id: AttemptId) -> GenerateRequest:
        """Return the request that goes on from here. Limits up to the first token are met once there was one."""
        request = self._request
        deadlines = request.deadlines
        if self.has_begun:
            self._is_continued = True
            deadlines = Deadlines(total=deadlines.total, inter_token_s=deadlines.inter_token_s)
        return msgspec.structs.replace(
            request,
            attempt_id=attempt_id,
            resume=tuple(self.token_ids),
            avoid=tuple(self._avoid),
            deadlines=deadlines,
        )

    def go_on_with(self, *, is_exact: bool) -> BuswayError | None:
        """Return the error when this completion may not be continued by an engine that is (not) exact.

        Greedy ones and those without a user's seed go on and are marked; a user's seed is a promise.
        """
        if is_exact or not self.has_begun:
            return None
        sampling = self._request.sampling
        if sampling.is_user_seeded and sampling.temperature > 0 and sampling.top_k != 1:
            return WorkerLostError(
                f"the worker was lost after {len(self.token_ids)} tokens, and this engine can't continue a seeded "
                "completion exactly: send the request again",
                phase="stream",
            )
        self.is_inexact = True
        return None

    def ending(self) -> FinishReason | None:
        """Return how the completion has ended, if what was delivered shows it."""
        if not self.has_begun:
            return None
        stop = self._request.stop
        last = self.token_ids[-1]
        if last in stop.stop_token_ids or last in self._end_ids:
            return "stop"
        return "length" if len(self.token_ids) >= stop.max_tokens else None

    def finish(self, attempt_id: AttemptId, reason: FinishReason, num_resubmits: int) -> Finished:
        """Return the last frame of a completion of which only that was lost."""
        return Finished(attempt_id, len(self.token_ids), reason, self.usage(None, num_resubmits))

    def usage(self, last: Usage | None, num_resubmits: int) -> Usage:
        """Return the usage of the whole completion, given the last attempt's: the prompt counts once, resumed ids are
        no part of it. What an attempt that went on found in a cache was put there by those before it: the prompt's hit
        is that of the one who gave the first token."""
        num_prompt_tokens = len(self._request.token_ids)
        hit = last.cached_tokens if last is not None and not self._is_continued else self._first_hit or 0
        last = last or Usage(prompt_tokens=num_prompt_tokens, completion_tokens=0)
        return msgspec.structs.replace(
            last,
            prompt_tokens=num_prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=min(hit, num_prompt_tokens),
            num_resubmits=num_resubmits,
            is_resumed=self.is_inexact,
        )
