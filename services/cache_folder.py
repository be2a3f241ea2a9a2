"""Where this user's cache is: models, engines' environments, compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $BUSWAY_CACHE, or ~/.cache/busway."""
    root = os.environ.get("BUSWAY_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "busway"
