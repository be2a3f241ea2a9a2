"""Feeding and stepping a core. vLLM itself is not needed: the core is a stand-in that says what a test has it say."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.engines.vllm import stepper as stepper_module
from services.engines.vllm.stepper import Stepper
from services.engines.vllm.words import CoreRequest

NOTHING: dict[str, Any] = {
    "new_token_ids": (),
    "new_logprobs": None,
    "finish_reason": None,
    "kv_transfer_params": None,
    "prefill_stats": None,
    "events": (),
}


class FakeCore:
    """Answers each step with the outputs that were put into `said`; `cached` are blocks by their hash."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.cached: dict[str, int] = {}
        self.aborted: list[str] = []
        self.batch_queue = None
        pool = SimpleNamespace(
            num_gpu_blocks=9,
            get_num_free_blocks=lambda: 8,
            hash_block_size=16,
            get_cached_block=lambda block_hash, groups: (
                [SimpleNamespace(block_id=self.cached[block_hash])] if block_hash in self.cached else None
            ),
        )
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]
        manager = SimpleNamespace(
            block_pool=pool,
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            evict_blocks=self._evict,
        )
        self.scheduler = SimpleNamespace(requests={}, running=[], kv_cache_manager=manager)
        self.abort_requests = self.aborted.extend

    def preprocess_add_request(self, request: CoreRequest) -> tuple[Any, int]:
        return SimpleNamespace(block_hashes=[f"hash of {request.id}"], prefill_stats=None, max_tokens=4), 0

    def add_request(self, request: Any, wave: int) -> None:
        pass

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        said, self.said = self.said, []
        return {0: SimpleNamespace(outputs=said, scheduler_stats=None)}, True

    def post_step(self, *, model_executed: bool) -> None:
        pass

    def say(self, core_id: str, **words: Any) -> None:
        self.said.append(SimpleNamespace(request_id=core_id, **NOTHING | words))

    def _evict(self, blocks: set[int]) -> None:
        self.cached = {key: block for key, block in self.cached.items() if block not in blocks}


class NoMetrics:
    def submitted(self, core_id: str, **counts: int) -> None:
        pass

    def left(self, core_id: str) -> None:
        pass

    def note(self, made: Any) -> None:
        pass


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def stepper(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> Stepper:
    monkeypatch.setattr(stepper_module, "to_core", lambda request: request)
    cache: Any = SimpleNamespace(has_news=lambda: False, changes=lambda: (), num_idle=lambda now: 0)
    metrics: Any = NoMetrics()
    return Stepper(core, cache, metrics)


def submit(stepper: Stepper, core_id: str, *, is_unproven: bool = False) -> None:
    stepper.submit(CoreRequest(id=core_id, token_ids=[1], sampling={}, is_unproven=is_unproven))


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_fetched_kv_of_a_request_that_failed_is_nobodys(core: FakeCore, stepper: Stepper, finish: str) -> None:
    """As where its load failed and the policy is to fail: no verdict will come for it."""
    submit(stepper, "a", is_unproven=True)
    submit(stepper, "b", is_unproven=True)
    core.cached = {"hash of a": 3, "hash of b": 4}
    core.say("a", finish_reason=finish)
    core.say("b", new_token_ids=(8,))
    report = stepper.step()
    assert report is not None
    assert [(one.id, one.finish) for one in report.outputs] == [("a", finish), ("b", None)]
    assert set(stepper._unproven) == {"b"}
    assert core.cached == {"hash of b": 4}


def test_an_output_that_cant_be_read_ends_its_request_alone(core: FakeCore, stepper: Stepper) -> None:
    for core_id in "abc":
        submit(stepper, core_id, is_unproven=core_id == "b")
    core.say("a", new_token_ids=(8,))
    core.say("b", new_token_ids=8)
    core.say("c", kv_transfer_params={"blocks": object()}, finish_reason="length")
    report = stepper.step()
    assert report is not None
    a, b, c = report.outputs
    assert (a.token_ids, a.finish) == ((8,), None)
    for one in (b, c):
        assert one.finish == "error"
        assert one.error is not None
        assert "vLLM's output can't be read" in one.error.message
    assert "b" in core.aborted
    assert stepper._unproven == {}
