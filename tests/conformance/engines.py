"""The engines that pass the suite, and how a worker of each is started here."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from deploy.engine_python import engine_python
from services.config import WorkerConfig


class EngineCase(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` follow `busway worker`; `start_s` bounds the start on a busy machine; `block_size` is as
    in `flags`."""

    name: str
    engine: str
    flags: tuple[str, ...]
    block_size: int
    backend: str
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    handoff: str = "pull"
    needs_model: bool = True
    start_s: float = 60.0

    def why_not(self) -> str:
        """Return why this engine can't run here, or ""."""
        if self.engine in ("sim", "torch"):
            return ""
        found = engine_python(WorkerConfig(engine=self.engine))  # type: ignore[arg-type]
        return "" if found else f"no environment for {self.engine}: run deploy/engines/install.sh {self.engine}"


# As slow as a quick real engine: some tests need a middle of the stream.
SLOW_SIM = ("--engine-arg", "decode_ms_per_step=2", "--engine-arg", "prefill_ms_per_token=0.02")
TORCH = ("--engine-arg", "dtype=float32", "--engine-arg", "threads=1", "--engine-arg", "block_size=16")
VLLM = (
    *("--", "--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"),
    *("--max-num-seqs", "32"),
)
VLLM_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles a helper, for most of a minute here
}

SIM = EngineCase(name="sim", engine="sim", backend="sim", flags=SLOW_SIM, block_size=16, needs_model=False)
CASES = (
    SIM,
    EngineCase(
        name="sim-rendezvous",
        engine="sim",
        backend="sim",
        flags=("--handoff", "rendezvous", *SLOW_SIM),
        block_size=16,
        handoff="rendezvous",
        needs_model=False,
    ),
    EngineCase(name="torch", engine="torch", backend="torch", flags=TORCH, block_size=16),
    EngineCase(
        name="torch-rendezvous",
        engine="torch",
        backend="torch",
        flags=("--handoff", "rendezvous", *TORCH),
        block_size=16,
        handoff="rendezvous",
    ),
    EngineCase(
        name="vllm",
        engine="vllm",
        backend="vllm",
        flags=VLLM,
        environ=VLLM_CPU,
        block_size=32,
        start_s=300.0,
    ),
    EngineCase(
        name="vllm-push",
        engine="vllm",
        backend="vllm",
        flags=(*VLLM, "--kv-transfer-config", '{"kv_connector": "NixlPushConnector"}'),
        environ=VLLM_CPU,
        block_size=32,
        start_s=300.0,
    ),
)


def environment(case: EngineCase, runtime_dir: Path) -> dict[str, str]:
    """Return a worker's environment: one thread each, none of the caller's busway settings but the cache."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_") or name == "BUSWAY_CACHE"
    }
    return kept | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime_dir)} | dict(case.environ)


def params() -> list[object]:
    """Return the cases as pytest parameters; external engines carry the marker conformance_{engine}."""
    return [pytest.param(case, id=case.name, marks=_marks(case)) for case in CASES]


def only(name: str) -> pytest.MarkDecorator:
    """Return the mark of tests that are one engine's alone."""
    case = next(case for case in CASES if case.name == name)
    return pytest.mark.parametrize("pair", [pytest.param(case, id=name, marks=_marks(case))], indirect=True)


def _marks(case: EngineCase) -> tuple[pytest.MarkDecorator, ...]:
    if case.engine in ("sim", "torch"):
        return (pytest.mark.slow,) if case.name == "torch-rendezvous" else ()
    return (getattr(pytest.mark, f"conformance_{case.engine}"), pytest.mark.timeout(600))
