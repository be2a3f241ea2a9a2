"""What can ever fit: a request that can't is refused at once, with the numbers."""

import msgspec

from schemas.errors import RequestError
from schemas.request import GenerateRequest
from services.engines.paged.runner import RunnerSpec
from services.lengths import Lengths, num_blocks


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes a scheduler works within. `eos_token_ids` end a completion unless the request ignores them;
    ids are below `vocab_size` (0: not checked)."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0

    @classmethod
    def of(cls, spec: RunnerSpec) -> "Limits":
        """Return the limits of a loaded runner."""
        return cls(
            num_blocks=spec.num_blocks,
            block_size=spec.layout.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_batched_tokens=spec.max_batched_tokens,
            max_context_tokens=spec.max_context_tokens,
            eos_token_ids=spec.card.eos_token_ids,
            vocab_size=spec.card.vocab_size,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold the KV of this many tokens."""
        return num_blocks(num_tokens, self.block_size)

    def check(self, request: GenerateRequest) -> None:
        """Raise RequestError for a request whose prompt and completion exceed the context, or with unknown ids."""
        self._check_ids(request)
        num_prompt, max_tokens = len(request.token_ids), request.stop.max_tokens
        limit = self.max_context_tokens
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; the context holds {limit}, at least one of them for the answer",
                param="messages",
            )
        if num_prompt + max_tokens > limit:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens={max_tokens} exceed the context of {limit} tokens",
                param="max_tokens",
            )
        if len(request.resume) > max_tokens:
            raise RequestError(
                f"{len(request.resume)} resumed tokens exceed max_tokens={max_tokens}", param="max_tokens"
            )

    def _check_ids(self, request: GenerateRequest) -> None:
        """One id outside the embedding table would end the engine for everybody."""
        largest = max(*request.token_ids, *request.resume, -1)
        if 0 < self.vocab_size <= largest:
            raise RequestError(
                f"token id {largest} is outside the vocabulary of {self.vocab_size} ids", param="token_ids"
            )

    def check_decode(self, request: GenerateRequest) -> None:
        """Raise RequestError for a request that exceeds the context, or with its whole completion the pool."""
        self.check(request)
        self.check_prompt_fits(request)
        num_prompt, max_tokens = len(request.token_ids), request.stop.max_tokens
        num_needed = self.num_blocks_for(Lengths.of(request).num_to_hold)
        if num_needed > self.num_blocks:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens={max_tokens} need {num_needed} KV blocks of "
                f"{self.block_size} tokens; this worker has {self.num_blocks}",
                param="max_tokens",
            )

    def check_hold(self, request: GenerateRequest) -> None:
        """Raise RequestError for a request that exceeds the context, or with its prompt the pool."""
        self.check(request)
        self.check_prompt_fits(request)
        if self.is_complete(request):
            raise RequestError("the resumed completion has ended already: there is nothing to prefill", param="resume")

    def check_prompt_fits(self, request: GenerateRequest) -> None:
        """Raise RequestError for a prompt (resumed ids included) that exceeds the pool."""
        num_tokens = Lengths.of(request).num_to_prefill
        num_needed = self.num_blocks_for(num_tokens)
        if num_needed > self.num_blocks:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and needs {num_needed} KV blocks of {self.block_size} tokens; "
                f"this worker has {self.num_blocks}",
                param="messages",
            )

    def is_complete(self, request: GenerateRequest) -> bool:
        """Return whether the resumed ids end the completion already (only the Finished frame was lost)."""
        resume = request.resume
        return bool(resume) and (len(resume) >= request.stop.max_tokens or resume[-1] in self.stop_ids(request))

    def stop_ids(self, request: GenerateRequest) -> frozenset[int]:
        """Return the ids that end this request's completion."""
        stop = request.stop
        return frozenset(stop.stop_token_ids if stop.ignore_eos else (*self.eos_token_ids, *stop.stop_token_ids))
