from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.models import DEFAULT_MODEL
from deploy.models.cache import models_root
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import Driver
from tests.engines.torch.tiny import KINDS, make_tiny


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=sorted(KINDS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tiny model, and that model by transformers; one of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny(request.param, folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_tiny("llama", folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = models_root() / DEFAULT_MODEL
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not in the cache: busway models fetch")
    return folder


@pytest.fixture(scope="session")
def smollm2_driver(smollm2: Path) -> Driver:
    return Driver(TorchRunner(smollm2, "smollm2", {"dtype": "float32", "device": "cpu", "num_blocks": "64"}))
