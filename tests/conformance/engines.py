"""The engines that pass the suite, and how a worker of each is started here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from deploy.engine_python import engine_python
from deploy.service import LAUNCHER_VARIABLE
from services.config import WorkerConfig

ModelKind = Literal["none", "card", "tiny"]


class EngineCase(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` follow `busway worker`, `decode_flags` the decode worker's alone; `start_s` bounds the start on a busy
    machine; `block_size` is as in `flags`. `model`: none, a folder without weights, or a tiny Llama.

    `free_s`: how soon KV that nobody will fetch is free; below the lease it was freed, it didn't run out. `refuses`:
    what the engine can't do and says so, by the name of the parameter. `caches_fetched`: decode tells of fetched KV in
    its prefix cache. `decode_serves_alone`: a decode worker computes prompts, too; else a third worker does the
    aggregated requests.
    """

    name: str
    engine: str
    flags: tuple[str, ...]
    block_size: int
    backend: str
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    handoff: str = "pull"
    decode_flags: tuple[str, ...] = ()
    model: ModelKind = "tiny"
    start_s: float = 60.0
    free_s: float = 4.0
    refuses: tuple[str, ...] = ()
    caches_fetched: bool = True
    decode_serves_alone: bool = True

    @property
    def is_built_in(self) -> bool:
        """Whether it runs in busway's own environment; so does the stand-in of TensorRT-LLM."""
        return self.engine in ("sim", "torch", "trtllm")

    def why_not(self) -> str:
        """Return why this engine can't run here, or ""."""
        if self.is_built_in:
            return ""
        found = engine_python(WorkerConfig(engine=self.engine))  # type: ignore[arg-type]
        return "" if found else f"no environment for {self.engine}: run deploy/engines/install.sh {self.engine}"


# As slow as a quick real engine: some tests need a middle of the stream.
SLOW_SIM = ("--engine-arg", "decode_ms_per_step=2", "--engine-arg", "prefill_ms_per_token=0.02")
TORCH = ("--engine-arg", "dtype=float32", "--engine-arg", "threads=1", "--engine-arg", "block_size=16")
VLLM = (
    *("--metrics", "127.0.0.1:0"),
    *("--", "--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"),
    *("--max-num-seqs", "32"),
)
VLLM_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# A stand-in, not TensorRT-LLM: that can't be installed here, nor run without an NVIDIA GPU. Its KV is freed by being
# fetched or by its time-out, as in the real one.
TRTLLM_TIMEOUT_S = 3.0
TRTLLM_ARGS = {
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": int(TRTLLM_TIMEOUT_S * 1000)},
    "kv_cache_config": {"tokens_per_block": 16, "max_blocks": 2048, "event_buffer_max_size": 4096},
    "max_seq_len": 1024,
    "max_num_tokens": 2048,
    "max_batch_size": 32,
    "enable_iter_perf_stats": True,
}
STAND_IN = Path(__file__).parent / "stand_in"
SGLANG = (
    *("--metrics", "127.0.0.1:0"),
    *("--", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--page-size", "16", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--mem-fraction-static", "0.3"),
)
SGLANG_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "UCX_NET_DEVICES": "lo",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # as above: seeds would compile a helper
}

SIM = EngineCase(name="sim", engine="sim", backend="sim", flags=SLOW_SIM, block_size=16, model="none")
CASES = (
    SIM,
    EngineCase(
        name="sim-rendezvous",
        engine="sim",
        backend="sim",
        flags=("--handoff", "rendezvous", *SLOW_SIM),
        block_size=16,
        handoff="rendezvous",
        model="none",
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
        name="trtllm-stand-in",
        engine="trtllm",
        backend="trtllm",
        flags=(
            *("--metrics", "127.0.0.1:0"),
            *(
                word
                for name, value in TRTLLM_ARGS.items()
                for word in ("--engine-arg", f"{name}={msgspec.json.encode(value).decode()}")
            ),
        ),
        environ={"PYTHONPATH": f"{STAND_IN}{os.pathsep}{STAND_IN.parents[2]}"},
        block_size=16,
        model="card",
        free_s=TRTLLM_TIMEOUT_S + 4.0,
        refuses=("min_tokens",),
        caches_fetched=False,
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
    EngineCase(
        name="sglang",
        engine="sglang",
        backend="sglang",
        flags=SGLANG,
        environ=SGLANG_CPU,
        block_size=16,
        handoff="rendezvous",
        start_s=400.0,
        caches_fetched=False,
        decode_serves_alone=False,
    ),
)
# Decode told to fail rather than to compute what it can't fetch.
VLLM_FAIL = EngineCase(
    name="vllm-fail",
    engine="vllm",
    backend="vllm",
    flags=VLLM,
    environ=VLLM_CPU | {"BUSWAY_WORKER_KV_LOAD_FAILURE": "fail"},
    block_size=32,
    start_s=300.0,
)
# A process for each half of the heads: too slow here for the whole suite. vLLM's prefill has all of them in one; SGLang
# needs, on CPUs, as many ranks on both sides.
TENSOR_PARALLEL = (
    EngineCase(
        name="vllm-tp",
        engine="vllm",
        backend="vllm",
        flags=VLLM,
        decode_flags=("--tensor-parallel-size", "2"),
        environ=VLLM_CPU,
        block_size=32,
        start_s=400.0,
    ),
    EngineCase(
        name="sglang-tp",
        engine="sglang",
        backend="sglang",
        flags=(*SGLANG, "--tensor-parallel-size", "2"),
        environ=SGLANG_CPU | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # it asks for one group of cores a rank
        block_size=16,
        handoff="rendezvous",
        start_s=500.0,
        caches_fetched=False,
        decode_serves_alone=False,
    ),
)


def environment(case: EngineCase, runtime_dir: Path) -> dict[str, str]:
    """Return a worker's environment: one thread each, none of the caller's busway settings but the cache. The worker
    dies with this process, whatever ends it."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("BUSWAY_") or name == "BUSWAY_CACHE"
    }
    ours = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime_dir), LAUNCHER_VARIABLE: str(os.getpid())}
    return kept | ours | dict(case.environ)


def params() -> list[object]:
    """Return the cases as pytest parameters; external engines carry the marker conformance_{engine}."""
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES]


def case_named(name: str) -> EngineCase:
    """Return a case by its name."""
    return next(case for case in (*CASES, VLLM_FAIL, *TENSOR_PARALLEL) if case.name == name)


def only(*names: str) -> pytest.MarkDecorator:
    """Return the mark of tests that are these engines' alone."""
    cases = [pytest.param(case, id=case.name, marks=marks(case)) for case in map(case_named, names)]
    return pytest.mark.parametrize("pair", cases, indirect=True)


def marks(case: EngineCase) -> tuple[pytest.MarkDecorator, ...]:
    """Return what says where a case's tests run: external engines' not in `make test`."""
    if case.is_built_in:
        return (pytest.mark.slow,) if case.name == "torch-rendezvous" else ()
    return (getattr(pytest.mark, f"conformance_{case.engine}"), pytest.mark.timeout(600))
