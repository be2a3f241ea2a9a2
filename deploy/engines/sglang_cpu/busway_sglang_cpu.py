"""Three things that SGLang needs on a machine without GPU. Imported at each start of Python in its CPU environment (by
a .pth file), so nothing heavy happens here before it is wanted.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MASK = 0xFFFFFFFF
KINDS_OF_MEMORY = "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds"


class _TorchvisionFinder(MetaPathFinder):
    """PyPI's torchvision is a CUDA build: beside a CPU torch its operators don't load, and then its own Python code
    fails on their absence. Declared beforehand they exist, though nobody could run them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def register() -> None:
    """SGLang's plugin entry point, called in each of its processes: the KV pool is main memory, tell NIXL so; and seeds
    have their hash.

    SGLang 0.5.23 calls every KV pool GPU memory, which NIXL refuses to register where there is no GPU.
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def main_memory(original: object, kinds: object, number: int) -> list[str]:
        return ["DRAM"] * number

    HookRegistry.register(KINDS_OF_MEMORY, main_memory, HookType.AROUND)
    torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", murmur_hash32)


def murmur_hash32(seeds: Any, positions: Any, columns: Any) -> Any:
    """Return MurmurHash3 of each (seed, position, column), in place of sgl_kernel's: 32 bits each, as int64
    [len(seeds), len(columns)]. `seeds` are 64 bits each, the others 32."""
    import torch

    seeds = seeds.view(torch.int64)[:, None]
    hashed = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions.to(torch.int64)[:, None], columns.to(torch.int64)[None, :]):
        mixed = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
        hashed = (_rotated(hashed ^ mixed, 13) * 5 + 0xE6546B64) & MASK
    hashed = hashed ^ 16  # bytes hashed
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return hashed ^ (hashed >> 16)


def _times(words: Any, factor: int) -> Any:
    return ((words & MASK) * factor) & MASK


def _rotated(words: Any, bits: int) -> Any:
    return ((words << bits) | (words >> (32 - bits))) & MASK


sys.meta_path.insert(0, _TorchvisionFinder())
