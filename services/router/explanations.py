"""The newest requests' choices, for whoever asks why. Bounded; no I/O."""

from collections import OrderedDict

import msgspec

from schemas.explanation import Choice, Explanation, Refusal
from schemas.ids import AttemptId, RequestId
from schemas.request import GenerateRequest

MAX_EXPLAINED = 2048


class _Explained(msgspec.Struct):
    request_id: RequestId
    num_prompt_tokens: int
    choices: list[Choice] = []
    refusal: Refusal | None = None


class Explanations:
    """By attempt; a request id finds the newest of its attempts."""

    def __init__(self, max_explained: int = MAX_EXPLAINED) -> None:
        self._max_explained = max_explained
        self._by_attempt: OrderedDict[AttemptId, _Explained] = OrderedDict()
        self._newest: dict[RequestId, AttemptId] = {}

    def note(self, request: GenerateRequest, choice: Choice) -> None:
        """A choice was made for the request."""
        self._of(request).choices.append(choice)

    def refuse(self, request: GenerateRequest, refusal: Refusal) -> None:
        """The request was taken by nobody."""
        self._of(request).refusal = refusal

    def explain(self, id: str, *, router: str, policy: str) -> Explanation:
        """Return what is known of an attempt, or of a request by its client's id; no choices when that is nothing."""
        attempt_id = AttemptId(id)
        if attempt_id not in self._by_attempt:
            attempt_id = self._newest.get(RequestId(id), attempt_id)
        one = self._by_attempt.get(attempt_id)
        if one is None:
            return Explanation(router=router, policy=policy)
        return Explanation(
            router=router,
            policy=policy,
            request_id=one.request_id,
            attempt_id=attempt_id,
            num_prompt_tokens=one.num_prompt_tokens,
            choices=tuple(one.choices),
            refusal=one.refusal,
        )

    def _of(self, request: GenerateRequest) -> _Explained:
        one = self._by_attempt.get(request.attempt_id)
        if one is None:
            one = _Explained(request_id=request.request_id, num_prompt_tokens=len(request.token_ids))
            self._by_attempt[request.attempt_id] = one
            self._newest[request.request_id] = request.attempt_id
            if len(self._by_attempt) > self._max_explained:
                self._drop_oldest()
        return one

    def _drop_oldest(self) -> None:
        attempt_id, one = self._by_attempt.popitem(last=False)
        if self._newest.get(one.request_id) == attempt_id:
            del self._newest[one.request_id]
