"""What the sim engine must say: the same scheduler and runner, alone, without processes, transfers or faults."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from schemas.frames import Finished, Tokens
from schemas.ids import AttemptId, RequestId
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from services.engines.paged.limits import Limits
from services.engines.paged.scheduler import Scheduler
from services.engines.sim.card import builtin_card
from services.engines.sim.runner import SimRunner


def _memory(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


@lru_cache(maxsize=4096)
def expected_ids(prompt: tuple[int, ...], max_tokens: int, *, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """Return the ids of this completion."""
    runner = SimRunner({})
    limits = Limits.of(runner.load(_memory))
    scheduler = Scheduler(limits)
    request = GenerateRequest(
        request_id=RequestId("oracle"),
        attempt_id=AttemptId("oracle"),
        model="sim",
        token_ids=prompt,
        sampling=Sampling(seed=seed, temperature=temperature),
        stop=StopConditions(max_tokens=max_tokens),
        stream=StreamAddress(subject="_INBOX.oracle"),
    )
    scheduler.generate(request, 0.0)
    ids: list[int] = []
    while True:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.apply(plan, runner.execute(plan.slices), 0.0)
        for notice in scheduler.take():
            if isinstance(notice, Tokens):
                ids += notice.token_ids
            elif isinstance(notice, Finished):
                return ids


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(builtin_card().tokenizer_json)


def expected_text(prompt: Sequence[int], max_tokens: int, *, seed: int = 0, temperature: float = 0.0) -> str:
    """Return the text of this completion."""
    ids = expected_ids(tuple(prompt), max_tokens, seed=seed, temperature=temperature)
    text: str = _tokenizer().decode(ids)
    return text
