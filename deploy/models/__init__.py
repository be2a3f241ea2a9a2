"""Models by name: fetched and converted once into a cache, so that `serve` needs no hub and no hand work.

Knows where models come from and how a GGUF becomes a Hugging Face folder; knows nothing of engines.
"""

from deploy.models.catalogue import DEFAULT_MODEL, ModelError
from deploy.models.fetch import fetch_model
from deploy.models.resolve import resolve_model

__all__ = ["DEFAULT_MODEL", "ModelError", "fetch_model", "resolve_model"]
