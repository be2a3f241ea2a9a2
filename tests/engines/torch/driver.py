"""Drives a ModelRunner without a scheduler: each sequence has its own shuffled blocks and its own chunk sizes."""

import mmap
import random
from dataclasses import dataclass, field

from schemas.frames import TokenLogprobs
from schemas.ids import AttemptId, new_attempt_id
from schemas.request import Sampling
from services.engines.paged.runner import ModelRunner, RunnerSpec, SampleSpec, Slice

GREEDY = Sampling(seed=0, temperature=0.0)


def allocate(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


@dataclass
class Sequence:
    """`chunks` are the sizes in which the prompt is computed; the last one repeats."""

    prompt: list[int]
    max_tokens: int
    chunks: list[int]
    block_table: list[int]
    sampling: Sampling = GREEDY
    num_logprobs: int | None = None
    attempt_id: AttemptId = field(default_factory=new_attempt_id)
    num_computed: int = 0
    completion: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.completion) >= self.max_tokens

    def next_slice(self) -> Slice:
        ids = self.prompt + self.completion
        size = self.chunks.pop(0) if len(self.chunks) > 1 else self.chunks[0]
        piece = ids[self.num_computed : self.num_computed + size]
        is_last = self.num_computed + len(piece) == len(ids)
        spec = SampleSpec(
            sampling=self.sampling,
            position=len(ids),
            history=ids,
            num_prompt_tokens=len(self.prompt),
            num_logprobs=self.num_logprobs,
        )
        return Slice(
            attempt_id=self.attempt_id,
            token_ids=piece,
            start=self.num_computed,
            block_table=self.block_table,
            sample=spec if is_last else None,
        )


class Driver:
    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.spec: RunnerSpec = runner.load(allocate)
        self._random = random.Random(seed)
        self._free = list(range(self.spec.num_blocks))
        self._random.shuffle(self._free)

    def start(self, prompt: list[int], max_tokens: int, chunks: list[int] | None = None, **more: object) -> Sequence:
        """Return a sequence with blocks for all of its tokens."""
        block_size = self.spec.layout.block_size
        num_blocks = -(-(len(prompt) + max_tokens) // block_size)
        table = [self._free.pop() for _ in range(num_blocks)]
        return Sequence(list(prompt), max_tokens, chunks or [len(prompt)], table, **more)  # type: ignore[arg-type]

    def step(self, sequences: list[Sequence]) -> None:
        """Run one step of those that aren't done, in random order; the finished give their blocks back."""
        running = [sequence for sequence in sequences if not sequence.is_done]
        self._random.shuffle(running)
        slices = [sequence.next_slice() for sequence in running]
        for sequence, piece, sampled in zip(running, slices, self.runner.execute(slices), strict=True):
            assert (sampled is None) == (piece.sample is None)
            sequence.num_computed += len(piece.token_ids)
            if sampled is not None:
                sequence.completion.append(sampled.token_id)
                sequence.logprobs.append(sampled.logprobs)
            if sequence.is_done:
                self._free.extend(sequence.block_table)

    def finish(self, sequences: list[Sequence]) -> list[list[int]]:
        """Step until all are done; return the completions."""
        while not all(sequence.is_done for sequence in sequences):
            self.step(sequences)
        return [sequence.completion for sequence in sequences]
