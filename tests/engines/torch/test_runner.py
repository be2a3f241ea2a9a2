"""The engine's own forward pass equals transformers' generate, whatever the chunks, the batch and the blocks."""

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.request import Sampling
from services.engines.torch import reads
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import Driver
from tests.engines.torch.tiny import VOCAB_SIZE, greedy_reference

ARGS = {"dtype": "float32", "device": "cpu", "block_size": "4", "num_blocks": "200"}


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_greedy_equals_transformers_for_odd_chunks_and_staggered_arrivals(tiny: tuple[Path, Any], kernels: str) -> None:
    folder, model = tiny
    driver = Driver(TorchRunner(folder, "tiny", ARGS | {"kernels": kernels}))
    waiting = prompts(1, [1, 3, 4, 5, 23, 37, 70])
    chunks = [[1], [2], [4], [3, 1], [7, 1, 5], [16, 3], [13, 29, 2]]
    expected = [greedy_reference(model, prompt, 14) for prompt in waiting]
    running = []
    for prompt, sizes in zip(waiting, chunks, strict=True):
        running.append(driver.start(prompt, 14, sizes))
        driver.step(running)
        driver.step(running)
    assert driver.finish(running) == expected


@pytest.mark.parametrize("max_bytes", [1, 9 * 4 * 192 * 4])
def test_sequences_read_in_groups_that_fit_a_cache_give_the_same(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """One sequence a group, and a few."""
    monkeypatch.setitem(reads.MAX_GATHERED_BYTES, "cpu", max_bytes)
    folder, model = tiny
    driver = Driver(TorchRunner(folder, "tiny", ARGS | {"kernels": "off"}))
    asked = prompts(3, [5, 6, 9, 14, 15, 16, 17])
    running = [driver.start(prompt, 9) for prompt in asked]
    assert driver.finish(running) == [greedy_reference(model, prompt, 9) for prompt in asked]


def test_a_prompt_in_one_piece_equals_the_same_in_single_tokens(tiny: tuple[Path, Any]) -> None:
    driver = Driver(TorchRunner(tiny[0], "tiny", ARGS))
    (prompt,) = prompts(2, [40])
    whole, single = driver.start(prompt, 8, num_logprobs=5), driver.start(prompt, 8, [1], num_logprobs=5)
    first, second = driver.finish([whole, single])
    assert first == second
    for a, b in zip(whole.logprobs, single.logprobs, strict=True):
        assert a is not None
        assert b is not None
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_logprobs_are_the_models_own_before_temperature_and_filters(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    driver = Driver(TorchRunner(folder, "tiny", ARGS))
    (prompt,) = prompts(3, [19])
    sampling = Sampling(seed=5, temperature=1.7, top_k=9, repetition_penalty=1.3)
    sequence = driver.start(prompt, 6, sampling=sampling, num_logprobs=4)
    driver.finish([sequence])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sequence.completion])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    for row, token_id, found in zip(expected, sequence.completion, sequence.logprobs, strict=True):
        assert found is not None
        assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        values, ids = row.topk(4)
        assert [i for i, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_batch(tiny_llama: Path) -> None:
    driver = Driver(TorchRunner(tiny_llama, "tiny", ARGS))
    sampling = Sampling(seed=-77, temperature=1.2, top_p=0.9, presence_penalty=0.4)
    (prompt, *others) = prompts(4, [21, 9, 30, 2])
    (alone,) = driver.finish([driver.start(prompt, 20, sampling=sampling)])
    crowd = [driver.start(other, 25, [5], sampling=Sampling(seed=3, temperature=0.8)) for other in others]
    driver.step(crowd)
    batched = driver.finish([driver.start(prompt, 20, [6, 1], sampling=sampling), *crowd])[0]
    assert batched == alone
    # Continued elsewhere: the first half of the completion is part of the prompt now, the positions go on. Only the
    # presence penalty knows the difference, so it is off here.
    plain = Sampling(seed=-77, temperature=1.2, top_p=0.9)
    (whole,) = driver.finish([driver.start(prompt, 20, sampling=plain)])
    (rest,) = driver.finish([driver.start(prompt + whole[:10], 10, [8], sampling=plain)])
    assert rest == whole[10:]


def test_kv_lies_where_the_layout_says(tiny: tuple[Path, Any]) -> None:
    """Another process computes addresses from KvLayout alone: block b's bytes, copied to block c, are the same KV."""
    folder, _ = tiny
    driver = Driver(TorchRunner(folder, "tiny", ARGS))
    (prompt,) = prompts(5, [26])
    original = driver.start(prompt, 9, [26])
    copied = driver.start(prompt, 9, [26])
    driver.step([original])
    region, layout = driver.runner.region(), driver.spec.layout
    assert region.num_bytes == region.num_blocks * layout.block_bytes
    pool = torch.frombuffer(_memory(region.address, region.num_bytes), dtype=torch.uint8)
    rows = pool.view(layout.num_layers * 2, region.num_blocks, layout.row_bytes)
    for source, destination in zip(original.block_table, copied.block_table, strict=True):
        rows[:, destination] = rows[:, source]
    copied.num_computed, copied.completion = 26, list(original.completion)
    copied.prompt = [0] * 26  # the wrong ids: only the KV can give the right continuation
    assert driver.finish([copied]) == driver.finish([original])


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_keeps_its_pool_in_it(tiny_llama: Path, dtype: str) -> None:
    driver = Driver(TorchRunner(tiny_llama, "tiny", ARGS | {"dtype": dtype}))
    assert driver.spec.layout.dtype == dtype
    assert driver.spec.layout.itemsize_bytes == 2
    (prompt,) = prompts(6, [17])
    first, second = driver.finish([driver.start(prompt, 12, [5]), driver.start(prompt, 12, [5])])
    assert first == second


def test_smollm2_equals_transformers_on_real_prompts(smollm2: Path, smollm2_driver: Driver) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    texts = ["What is the capital of France?", "Count: 1, 2, 3,", "def fibonacci(n):\n    " * 12]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    ids = [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in conversations
    ]
    expected = [greedy_reference(model, prompt, 12) for prompt in ids]
    sequences = [
        smollm2_driver.start(prompt, 12, chunks) for prompt, chunks in zip(ids, [[37], [5], [50, 17]], strict=True)
    ]
    found = smollm2_driver.finish(sequences)
    assert [ids[: len(reference)] for ids, reference in zip(found, expected, strict=True)] == expected
    assert tokenizer.decode(expected[0]).startswith("The capital of France is Paris.")
