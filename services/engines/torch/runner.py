"""TorchRunner: a ModelRunner for Hugging Face checkpoints. It lives on the paged engine's thread."""

import logging
from pathlib import Path

import torch

from schemas.errors import RequestError
from schemas.ids import AttemptId
from schemas.request import Sampling
from services.engines.model_files import load_card
from services.engines.paged.runner import AllocateHost, Draw, RunnerSpec, SampleSpec, Slice
from services.engines.torch.architecture import Architecture, Rope, read_architecture
from services.engines.torch.args import EngineArgs, parse_engine_args
from services.engines.torch.fused import FusedOperators
from services.engines.torch.kernels import KernelsMissing
from services.engines.torch.linear import can_pack
from services.engines.torch.model import Model
from services.engines.torch.operators import Operators, TorchOperators
from services.engines.torch.plan import plan_step
from services.engines.torch.pool import KvPool
from services.engines.torch.sampler import sample
from services.engines.torch.step import StepSlices
from services.engines.torch.weights import Weights
from services.kv.layout import KvLayout, KvRegion

GIB = 2**30
CPU_KV_MEMORY_GIB = 1.0
MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}

log = logging.getLogger(__name__)


class TorchRunner:
    """A model of the folder `model_path`, named `model_name` to users; see EngineArgs for `engine_args`.

    Raises RequestError, at once for bad arguments and from `load` for a model that the engine can't honour.
    """

    def __init__(self, model_path: Path | str, model_name: str, engine_args: dict[str, str] | None = None) -> None:
        self._folder = Path(model_path)
        self._model_name = model_name
        self._args = parse_engine_args(engine_args or {})
        self._device = _device(self._args.device)
        self._model: Model | None = None
        self._pool: KvPool | None = None

    def load(self, allocate: AllocateHost) -> RunnerSpec:
        """Load and warm up, on the calling thread: torch's thread count is the thread's own, so it must be the one
        that calls `execute`."""
        if self._args.threads:
            torch.set_num_threads(self._args.threads)
        with torch.inference_mode():
            spec = self._load(allocate)
        self._warm_up(spec)
        return spec

    def _load(self, allocate: AllocateHost) -> RunnerSpec:
        card = load_card(self._folder, self._model_name)
        architecture, rope = read_architecture(self._folder)
        dtype = _dtype(self._args.dtype, architecture.dtype, self._device)
        operators = _operators(self._args.kernels, architecture, rope, getattr(torch, dtype), self._device)
        self._model = Model(architecture, Weights(self._folder, self._device, getattr(torch, dtype)), operators)
        layout = _layout(architecture, dtype, self._args.block_size)
        num_blocks = _num_blocks(self._args, layout, self._device)
        self._pool = KvPool(layout, num_blocks, self._device, allocate)
        capacity = min(num_blocks * layout.block_size, architecture.max_context_tokens)
        log.info("%s on %s in %s, %d KV blocks", architecture.name, self._device, dtype, num_blocks)
        return RunnerSpec(
            backend="torch",
            engine_version=f"torch-{torch.__version__}",
            card=card,
            layout=layout,
            num_blocks=num_blocks,
            max_num_seqs=self._args.max_num_seqs,
            max_batched_tokens=self._args.max_batched_tokens or MAX_BATCHED_TOKENS[self._device.type],
            max_context_tokens=min(self._args.max_context_tokens or capacity, capacity),
            is_deterministic=dtype == "float32",
        )

    def region(self) -> KvRegion:
        """Return the pool's memory; call after `load`."""
        return self._loaded()[1].region()

    def execute(self, slices: list[Slice]) -> list[Draw | None]:
        """Run one step; see ModelRunner."""
        model, pool = self._loaded()
        with torch.inference_mode():
            arch = model.architecture
            step = StepSlices(slices, pool.layout, pool.num_blocks, arch.num_heads, self._device)
            plan = plan_step(step, set(arch.windows), model.operators.read_decodes)
            wanted = [(place, spec) for place in step.order if (spec := slices[place].sample) is not None]
            sampled = sample(model.forward(plan, pool), [spec for _, spec in wanted])
        results: list[Draw | None] = [None] * len(slices)
        for (place, _), token in zip(wanted, sampled, strict=True):
            results[place] = token
        return results

    def close(self) -> None:
        """Drop the weights. The pool stays until the process ends: peers may be reading it."""
        self._model = None

    def _loaded(self) -> tuple[Model, KvPool]:
        if self._model is None or self._pool is None:
            raise RuntimeError("the runner is not loaded")
        return self._model, self._pool

    def _warm_up(self, spec: RunnerSpec) -> None:
        """Run a prompt and a token through block 0 (nobody's yet): kernels are chosen and scratch memory taken."""
        num_tokens = max(1, min(spec.layout.block_size, spec.max_context_tokens))
        sampling = Sampling(seed=0, temperature=1.0, top_p=0.9)
        for start, token_ids in ((0, [0] * num_tokens), (num_tokens - 1, [0])):
            drawn = SampleSpec(sampling=sampling, position=1, history=[0], num_prompt_tokens=1)
            piece = Slice(
                attempt_id=AttemptId("warm-up"), token_ids=token_ids, start=start, block_table=[0], sample=drawn
            )
            self.execute([piece])


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RequestError(f"device {name!r}: torch finds no CUDA device here", param="device")
    return torch.device(name)


def _dtype(wanted: str, checkpoint: str, device: torch.device) -> str:
    """Return the dtype's name; auto is the checkpoint's own where the device computes it fast."""
    if wanted != "auto":
        return wanted
    if device.type == "cpu" and not can_pack(getattr(torch, checkpoint)):
        return "float32"
    return checkpoint


def _operators(
    kernels: str, architecture: Architecture, rope: Rope, dtype: torch.dtype, device: torch.device
) -> Operators:
    """Return the fused operators where they are wanted and can be had."""
    if device.type == "cpu" and kernels != "off":
        try:
            return FusedOperators(architecture, rope, dtype)
        except KernelsMissing as reason:
            if kernels == "on":
                raise RequestError(f"fused kernels: {reason}", param="kernels") from reason
            log.info("no fused kernels: %s", reason)
    elif kernels == "on":
        raise RequestError(f"fused kernels are for CPUs, the device is {device}", param="kernels")
    return TorchOperators(architecture, rope, dtype, device)


def _layout(architecture: Architecture, dtype: str, block_size: int) -> KvLayout:
    return KvLayout(
        num_layers=architecture.num_layers,
        num_kv_heads=architecture.num_kv_heads,
        block_size=block_size,
        head_dim=architecture.head_dim,
        dtype=dtype,
        itemsize_bytes=getattr(torch, dtype).itemsize,
    )


def _num_blocks(args: EngineArgs, layout: KvLayout, device: torch.device) -> int:
    if args.num_blocks:
        return args.num_blocks
    if args.kv_memory_gib or device.type == "cpu":
        num_bytes = int((args.kv_memory_gib or CPU_KV_MEMORY_GIB) * GIB)
    else:
        num_bytes = int(torch.cuda.mem_get_info(device)[0] * args.memory_fraction)
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise RequestError(
            f"a KV block takes {layout.block_bytes} bytes, the pool has {num_bytes}", param="kv_memory_gib"
        )
    return num_blocks
