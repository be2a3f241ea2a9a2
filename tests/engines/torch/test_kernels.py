"""Compiling the kernels: once a machine, whole or not at all, and never demanded."""

import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import RequestError
from services.engines.torch import kernels
from services.engines.torch.fused import FusedOperators
from services.engines.torch.kernels import KernelsMissing, load_kernels
from services.engines.torch.operators import TorchOperators
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import Driver

ARGS = {"dtype": "float32", "device": "cpu", "num_blocks": "8"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BUSWAY_CACHE", str(tmp_path))
    load_kernels.cache_clear()
    yield tmp_path / "kernels"
    load_kernels.cache_clear()


@pytest.fixture
def has_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a source that is compiled at once."""
    source = tmp_path / "short.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(kernels, "SOURCE", source)
    try:
        load_kernels()
    except KernelsMissing as reason:
        pytest.skip(str(reason))
    for library in cache.iterdir():
        library.unlink()
    load_kernels.cache_clear()


def operators_of(driver: Driver) -> object:
    return driver.runner._model.operators  # type: ignore[attr-defined]


@pytest.mark.usefixtures("has_compiler")
def test_they_are_compiled_once_and_used_again(cache: Path) -> None:
    load_kernels()
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    load_kernels.cache_clear()
    load_kernels()
    assert [library] == list(cache.iterdir())
    assert library.stat().st_mtime_ns == made


@pytest.mark.usefixtures("has_compiler")
def test_workers_that_start_together_leave_one_library(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")  # they compile the real one
    workers = [context.Process(target=load_kernels) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.usefixtures("has_compiler")
def test_another_source_is_another_library(cache: Path) -> None:
    load_kernels()
    kernels.SOURCE.write_text(kernels.SOURCE.read_text() + "// changed\n")
    load_kernels.cache_clear()
    load_kernels()
    assert len(list(cache.iterdir())) == 2


def test_a_model_uses_them_where_it_can(tiny_llama: Path) -> None:
    try:
        load_kernels()
    except KernelsMissing as reason:
        pytest.skip(str(reason))
    assert isinstance(operators_of(Driver(TorchRunner(tiny_llama, "tiny", ARGS))), FusedOperators)
    off = Driver(TorchRunner(tiny_llama, "tiny", ARGS | {"kernels": "off"}))
    assert isinstance(operators_of(off), TorchOperators)


@pytest.mark.parametrize(("compiler", "complaint"), [("no-such-compiler", "not found"), ("false", "false failed")])
@pytest.mark.usefixtures("cache")
def test_without_a_working_compiler_torch_computes_and_says_why(
    compiler: str,
    complaint: str,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    caplog.set_level(logging.INFO)
    assert isinstance(operators_of(Driver(TorchRunner(tiny_llama, "tiny", ARGS))), TorchOperators)
    assert any("no fused kernels" in line and complaint in line for line in caplog.messages)


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(KernelsMissing, match=r"\.so can't be made or loaded"):
        load_kernels()


@pytest.mark.usefixtures("cache")
def test_demanded_they_are_there_or_the_engine_refuses(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RequestError, match="no C\\+\\+ compiler") as caught:
        Driver(TorchRunner(tiny_llama, "tiny", ARGS | {"kernels": "on"}))
    assert caught.value.param == "kernels"
