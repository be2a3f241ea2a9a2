from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.torch.tiny import KINDS, make_tiny


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    """`-m gpu` selects these tests; without a device they fail, not skip: a green GPU run has used one."""
    assert torch.cuda.is_available(), "tests marked gpu need a CUDA device"


@pytest.fixture(scope="session", params=sorted(KINDS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tiny model, and that model by transformers, on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny(request.param, folder)
