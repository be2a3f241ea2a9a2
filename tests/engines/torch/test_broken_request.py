"""A request whose logits aren't finite fails alone: its batch, and who gets its blocks next, notice nothing."""

from pathlib import Path

import pytest
import torch

from schemas.frames import Failed, Finished, Tokens
from schemas.ids import AttemptId
from schemas.request import GenerateRequest
from services.engines.paged.limits import Limits
from services.engines.paged.scheduler import Scheduler
from services.engines.torch.runner import TorchRunner
from tests.engines.scenes import a_request, allocate
from tests.engines.torch.tiny import make_tiny

BROKEN_ID = 77
BLOCK_SIZE = 8
ARGS = {"dtype": "float32", "device": "cpu", "block_size": str(BLOCK_SIZE), "num_blocks": "12"}
HEALTHY = [list(range(5, 18)), list(range(30, 47))]
BROKEN = [9] * BLOCK_SIZE + [BROKEN_ID] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing finite of one token."""
    folder = tmp_path_factory.mktemp("broken")
    model = make_tiny("llama-biased", folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN_ID] = float("nan")
    model.save_pretrained(folder)
    return folder


class Engine:
    """A scheduler and its runner, stepped until nothing is left to do."""

    def __init__(self, folder: Path) -> None:
        self._runner = TorchRunner(folder, "tiny", ARGS)
        self.scheduler = Scheduler(Limits.of(self._runner.load(allocate)))
        self.ids: dict[AttemptId, list[int]] = {}
        self.ends: dict[AttemptId, Finished | Failed] = {}

    def run(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.ids[request.attempt_id] = []
            self.scheduler.generate(request, 0.0)
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.scheduler.apply(plan, self._runner.execute(plan.slices), 0.0)
        for notice in self.scheduler.take():
            if isinstance(notice, Tokens):
                self.ids[notice.attempt_id] += notice.token_ids
            elif isinstance(notice, Finished | Failed):
                self.ends[notice.attempt_id] = notice

    def answers(self, *prompts: list[int]) -> list[list[int]]:
        requests = [a_request(prompt, 12, temperature=0.8) for prompt in prompts]
        self.run(*requests)
        return [self.ids[request.attempt_id] for request in requests]


def test_a_request_without_finite_logits_fails_alone(folder: Path) -> None:
    expected = [Engine(folder).answers(prompt)[0] for prompt in HEALTHY]
    engine = Engine(folder)
    broken = a_request(BROKEN, 12)
    healthy = [a_request(prompt, 12, temperature=0.8) for prompt in HEALTHY]
    engine.run(healthy[0], broken, healthy[1])
    end = engine.ends[broken.attempt_id]
    assert isinstance(end, Failed)
    assert (end.error.code, end.error.phase, end.seq) == ("engine_failed", "prefill", 0)
    assert "not finite" in end.error.message
    assert [engine.ids[request.attempt_id] for request in healthy] == expected
    assert engine.scheduler.load().kv_blocks_used == 0


def test_who_gets_its_blocks_next_notices_nothing(folder: Path) -> None:
    """All 12 blocks have been broken requests'; what lies behind a sequence's last token weighs nothing."""
    expected = [Engine(folder).answers(prompt)[0] for prompt in HEALTHY]
    engine = Engine(folder)
    engine.run(*(a_request([BROKEN_ID, *range(salt, salt + 3 * BLOCK_SIZE)], 4) for salt in range(3)))
    assert engine.scheduler.load().kv_blocks_used == 0
    assert engine.scheduler.load().kv_blocks_cached == 0
    assert engine.answers(*HEALTHY) == expected


def test_its_kv_is_nobodys_prefix_hit(folder: Path) -> None:
    engine = Engine(folder)
    engine.run(a_request([BROKEN_ID, *range(100, 100 + 2 * BLOCK_SIZE)], 4))
    again = a_request([BROKEN_ID, *range(100, 100 + 2 * BLOCK_SIZE)], 4)
    engine.run(again)
    assert isinstance(engine.ends[again.attempt_id], Failed)
    assert engine.scheduler.load().num_cached_tokens == 0
