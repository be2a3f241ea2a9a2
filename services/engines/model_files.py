"""What a Hugging Face model folder says about itself, read without torch or transformers: the ModelCard.

The gateway, which may run where no model lies, gets all it needs from this card.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import RequestError
from schemas.model_card import ModelCard, SamplingDefaults

CARD_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
WINDOW_BYTES = 64 * 1024
NUM_WINDOWS = 64


def load_card(path: Path | str, served_name: str) -> ModelCard:
    """Return the card of the model in the folder `path`, named `served_name` to users.

    Raises RequestError naming the file that is missing or malformed.
    """
    folder = Path(path)
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    tokenizer_settings = _read_optional_json(folder / "tokenizer_config.json")
    generation = _read_optional_json(folder / "generation_config.json")
    return ModelCard(
        model=served_name,
        digest=model_digest(folder),
        tokenizer_json=_read_text(folder / "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_settings),
        bos_token=_token_text(tokenizer_settings.get("bos_token")),
        eos_token=_token_text(tokenizer_settings.get("eos_token")),
        eos_token_ids=_eos_token_ids(text, generation),
        max_context_tokens=int(text.get("max_position_embeddings", 0)),
        vocab_size=int(text.get("vocab_size", 0)),
        sampling=_sampling_defaults(generation),
    )


def model_digest(folder: Path) -> str:
    """Return 32 hex digits that differ when config, tokenizer or weights differ.

    The JSON files and the chat template are hashed whole: a card is found by its digest. Of each weight file, its
    name, its size and `NUM_WINDOWS` windows of `WINDOW_BYTES` spread evenly from start (the safetensors header) to
    end are hashed: 4 MiB a file, so that a 100 GB model starts at once. Retrained or requantized weights differ
    everywhere and are seen; a hand-made change of single bytes between two windows is not.
    """
    digest = hashlib.sha256(b"busway model digest 1")
    for name in CARD_FILES:
        if (folder / name).is_file():
            _feed(digest, name, [(folder / name).read_bytes()])
    for weights in weight_files(folder):
        _feed(digest, weights.name, _windows(weights))
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files by name; with an index, only those it lists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object file; raises RequestError naming it when it is missing or no JSON object."""
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}", param="model_path") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path} holds no JSON object", param="model_path")
    return value


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"model file {path} can't be read: {error.strerror}", param="model_path") from error


def _chat_template(folder: Path, tokenizer_settings: dict[str, Any]) -> str:
    """Return the default chat template: a file of its own wins, as in transformers; of several, the one so named."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return _read_text(own_file)
    template = tokenizer_settings.get("chat_template") or ""
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", "")
    return str(template)


def _token_text(token: Any) -> str:
    """Return a special token's text: it is written as a string, an AddedToken object, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return str(token) if token else ""


def _eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a completion: generation_config's win, each an id, a list of ids, or null."""
    for settings in (generation_config, config):
        eos = settings.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ()


def _sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    """Return what a generation_config asks for by name; null and a top_k of -1 say nothing."""
    named = {name: generation_config.get(name) for name in SamplingDefaults.__struct_fields__}
    said = {name: value for name, value in named.items() if value is not None and (name, value) != ("top_k", -1)}
    try:
        return msgspec.convert(said, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise RequestError(f"generation_config.json: {error}", param="model_path") from error


def _feed(digest: "hashlib._Hash", name: str, chunks: Iterator[bytes] | list[bytes]) -> None:
    digest.update(f"\0{name}\0".encode())
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)


def _windows(path: Path) -> Iterator[bytes]:
    """Yield the file's size, then evenly spaced windows of it, first and last bytes included."""
    size = os.stat(path).st_size
    yield size.to_bytes(8, "little")
    last_start = max(size - WINDOW_BYTES, 0)
    with open(path, "rb") as content:
        for start in sorted({last_start * i // (NUM_WINDOWS - 1) for i in range(NUM_WINDOWS)}):
            content.seek(start)
            yield content.read(WINDOW_BYTES)
