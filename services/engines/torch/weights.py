"""A checkpoint's tensors, from safetensors files: each taken once, and none may be left over."""

from pathlib import Path
from typing import Any

import torch

from schemas.errors import RequestError
from services.engines.model_files import weight_files

RECOMPUTED = "rotary_emb.inv_freq"  # old Llama checkpoints carry it; it follows from the config


class Weights:
    """The tensors of the checkpoint in `folder`, brought to `device` and `dtype` as they are taken."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from safetensors import safe_open

        files = weight_files(folder)
        if not files:
            raise RequestError(f"{folder} has no safetensors files (pickled weights are never read)", param="model")
        self._device = device
        self._dtype = dtype
        self._homes: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._homes.update(dict.fromkeys(list(opened.keys()), opened))

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor; raises RequestError when it is missing (or taken) or of another shape."""
        if name not in self._homes:
            raise RequestError(f"the checkpoint lacks {name}", param="model")
        tensor = self._homes.pop(name).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise RequestError(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}", param="model")
        return tensor.to(device=self._device, dtype=self._dtype)

    def take_if_there(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the tensor, or None when the checkpoint has none of that name."""
        return self.take(name, shape) if name in self else None

    def drop(self, name: str) -> None:
        """Leave out a tensor that isn't needed."""
        self._homes.pop(name, None)

    def finish(self) -> None:
        """Raise RequestError when a tensor was never taken: the model has a part that the engine doesn't compute."""
        left_over = sorted(name for name in self._homes if not name.endswith(RECOMPUTED))
        if left_over:
            shown = ", ".join(left_over[:3])
            raise RequestError(
                f"the torch engine doesn't know what to do with {len(left_over)} tensors: {shown}", param="model"
            )
        self._homes.clear()
