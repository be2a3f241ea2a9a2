"""Is the engine there, and is it a version this adapter was tested with? Asked without importing it."""

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from schemas.errors import RequestError

_log = logging.getLogger(__name__)


def require_version(
    engine: str, packages: Sequence[str], tested: Sequence[str], *, install: str, allow_untested: bool
) -> str:
    """Return the version of the first of `packages` that is installed.

    Raises RequestError, saying how to `install`, when none is, and for a version not in `tested` (a local part such as
    +cpu doesn't count) unless `allow_untested`, which warns instead.
    """
    found = _first_installed(packages)
    if found is None:
        raise RequestError(f"{engine} is not installed in this Python environment: {install}", param="engine")
    if found.partition("+")[0] not in tested:
        message = f"{engine} {found} is untested; this adapter was tested with {', '.join(tested)}"
        if not allow_untested:
            raise RequestError(f"{message}. --engine-arg allow_untested=true runs it all the same", param="engine")
        _log.warning("%s", message)
    return found


def _first_installed(packages: Sequence[str]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
