"""In bfloat16 the engine stays as near to the model in float32 as transformers does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engines.torch.model import Model
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import Driver

TEXTS = ["What is the capital of France?", "Explain how TCP works.", "def fib(n):", "List three fruits, please."]
NUM_PREFIXES = 6


@pytest.fixture(scope="module")
def prefixes(smollm2: Path) -> list[list[int]]:
    """Return the last few prefixes of each prompt: their next tokens are from sure to open."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    found = []
    for text in TEXTS:
        conversation = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        found += [ids[: len(ids) - cut] for cut in range(NUM_PREFIXES)]
    return found


def reference_logits(folder: Path, dtype: torch.dtype, prefixes: list[list[int]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return torch.stack([model(torch.tensor([ids])).logits[0, -1].float() for ids in prefixes])


def engine_logits(
    folder: Path, kernels: str, prefixes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    forward = Model.forward

    def noting(self: Model, *args: object) -> torch.Tensor:
        seen.append(forward(self, *args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(Model, "forward", noting)
    args = {"dtype": "bfloat16", "device": "cpu", "num_blocks": "64", "kernels": kernels}
    driver = Driver(TorchRunner(folder, "smollm2", args))
    rows = []
    for ids in prefixes:
        seen.clear()
        driver.finish([driver.start(ids, 1, [len(ids)])])
        rows.append(seen[0][0].clone())
    return torch.stack(rows)


def divergence(found: torch.Tensor, model: torch.Tensor) -> float:
    """Mean KL from the model's next-token distributions, in nats."""
    expected, got = model.log_softmax(-1), found.log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def test_bfloat16_is_as_near_to_the_model_as_transformers_is(
    smollm2: Path, prefixes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = reference_logits(smollm2, torch.float32, prefixes)
    theirs = divergence(reference_logits(smollm2, torch.bfloat16, prefixes), exact)
    for kernels in ("auto", "off"):
        ours = divergence(engine_logits(smollm2, kernels, prefixes, monkeypatch), exact)
        assert 0 < ours < 1.25 * theirs
