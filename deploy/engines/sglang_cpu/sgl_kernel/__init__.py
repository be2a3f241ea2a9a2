"""In place of sgl_kernel, which is built for GPUs only: every name can be imported, none can be called.

SGLang imports many of its kernels wherever it runs; on the way of a Llama over torch's own attention it calls none.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.10"


class Absent:
    """A kernel that isn't here."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "Absent":
        return _absent(self.__name__, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self.__name__} needs a GPU: this is busway's stand-in for sgl_kernel on CPUs")


def _absent(owner: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no {name}")
    return Absent(f"{owner}.{name}")


def __getattr__(name: str) -> Absent:
    return _absent(__name__, name)


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Makes sgl_kernel.anything a module whose names are all absent kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _absent(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_SubmoduleFinder())
