"""The torch engine's `--engine-arg`s: strings in, one checked struct out."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from schemas.errors import RequestError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Count = Annotated[int, Meta(ge=0)]


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """0 means: choose. `dtype` auto is the checkpoint's own, except on CPUs without fast bfloat16, where it is
    float32 (measured on AVX2: a batch of 8 decodes 4 times faster, 512 tokens prefill 8 times faster).

    `num_blocks` wins over `kv_memory_gib` (the pool's size; chosen: 1 on CPU), which wins over `memory_fraction`
    (of the GPU memory left after loading the weights). `threads` are torch's, in this process.

    `kernels`: fused ones, compiled at first use, on CPUs. auto: where there is a C++ compiler; on: or refuse to start.
    """

    dtype: DtypeName = "auto"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    kernels: Literal["auto", "on", "off"] = "auto"
    threads: Count = 0
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    num_blocks: Count = 0
    kv_memory_gib: Annotated[float, Meta(ge=0.0)] = 0.0
    memory_fraction: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.8
    max_num_seqs: Annotated[int, Meta(ge=1)] = 64
    max_batched_tokens: Count = 0
    max_context_tokens: Count = 0


def parse_engine_args(engine_args: dict[str, str]) -> EngineArgs:
    """Return the checked arguments; raises RequestError naming the argument and what it may be."""
    unknown = sorted(set(engine_args) - set(EngineArgs.__struct_fields__))
    if unknown:
        known = ", ".join(EngineArgs.__struct_fields__)
        raise RequestError(f"unknown engine argument {unknown[0]!r}; the torch engine knows {known}", param=unknown[0])
    try:
        return msgspec.convert(engine_args, EngineArgs, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"engine argument refused: {error}", param="engine_args") from error
