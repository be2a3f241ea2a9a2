"""The torch engine on CUDA: the same tokens as transformers on the CPU in float32, and a pool in VRAM."""

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.request import Sampling
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import Driver
from tests.engines.torch.test_runner import prompts
from tests.engines.torch.tiny import greedy_reference

pytestmark = pytest.mark.gpu

ARGS = {"dtype": "float32", "device": "cuda", "block_size": "4", "num_blocks": "200"}


def test_greedy_equals_transformers_for_odd_chunks_and_staggered_arrivals(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    driver = Driver(TorchRunner(folder, "tiny", ARGS))
    waiting = prompts(1, [1, 4, 23, 70])
    running = []
    for prompt, sizes in zip(waiting, [[1], [3, 1], [7, 1, 5], [13, 29, 2]], strict=True):
        running.append(driver.start(prompt, 14, sizes))
        driver.step(running)
    assert driver.finish(running) == [greedy_reference(model, prompt, 14) for prompt in waiting]


def test_a_seeded_draw_is_the_same_on_both_devices(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    sampling = Sampling(seed=12, temperature=1.1, top_p=0.95, frequency_penalty=0.3)
    (prompt,) = prompts(2, [31])
    drawn = []
    for device in ("cpu", "cuda"):
        driver = Driver(TorchRunner(folder, "tiny", ARGS | {"device": device}))
        drawn += driver.finish([driver.start(prompt, 16, [9], sampling=sampling)])
    assert drawn[0] == drawn[1]


def test_the_pool_is_one_allocation_in_vram(tiny: tuple[Path, Any]) -> None:
    driver = Driver(TorchRunner(tiny[0], "tiny", ARGS | {"dtype": "bfloat16"}))
    region = driver.runner.region()
    assert region.memory == "VRAM"
    assert region.device_id == torch.cuda.current_device()
    assert region.num_bytes == 200 * driver.spec.layout.block_bytes
    (prompt,) = prompts(3, [17])
    first, second = driver.finish([driver.start(prompt, 12, [5]), driver.start(prompt, 12, [5])])
    assert first == second
