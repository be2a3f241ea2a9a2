"""An engine's own Prometheus series where it keeps them in the process's registry, beside others'."""

from collections.abc import Iterator
from typing import Any


def series_text(prefix: str) -> bytes:
    """Return the families whose names begin so, in Prometheus' text form; any thread may ask."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_Families(prefix)))


class _Families:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        from prometheus_client import REGISTRY

        return (family for family in REGISTRY.collect() if family.name.startswith(self._prefix))
