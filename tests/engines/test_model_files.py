"""The model card: read from small hand-made folders, and from the real one when it is cached."""

import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from schemas.errors import RequestError
from schemas.model_card import SamplingDefaults
from services.engines.model_files import NUM_WINDOWS, WINDOW_BYTES, load_card, model_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "config.json", {"max_position_embeddings": 99, "vocab_size": 7, "eos_token_id": 5})
    write(tmp_path / "tokenizer.json", {"model": {"type": "BPE"}})
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_a_bare_folder_makes_a_card(folder: Path) -> None:
    card = load_card(folder, "served")
    assert (card.model, card.max_context_tokens, card.vocab_size, card.eos_token_ids) == ("served", 99, 7, (5,))
    assert json.loads(card.tokenizer_json) == {"model": {"type": "BPE"}}
    assert (card.chat_template, card.bos_token, card.eos_token) == ("", "", "")


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({"eos_token_id": [3, 4]}, (3, 4)), ({"eos_token_id": 2}, (2,)), ({"eos_token_id": None}, (5,)), ({}, (5,))],
)
def test_eos_ids_come_from_the_generation_config_first(
    folder: Path, generation_config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write(folder / "generation_config.json", generation_config)
    assert load_card(folder, "m").eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)),
        ({"temperature": None, "top_k": -1, "repetition_penalty": 1.1}, SamplingDefaults(repetition_penalty=1.1)),
    ],
)
def test_sampling_defaults_are_the_generation_configs(
    folder: Path, generation_config: dict[str, Any], expected: SamplingDefaults
) -> None:
    write(folder / "generation_config.json", generation_config)
    assert load_card(folder, "m").sampling == expected


def test_a_sampling_default_out_of_range_is_named(folder: Path) -> None:
    write(folder / "generation_config.json", {"top_p": 7})
    with pytest.raises(RequestError, match=r"generation_config.json.*top_p"):
        load_card(folder, "m")


def test_special_tokens_are_texts_whether_strings_or_objects(folder: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": "T"}
    write(folder / "tokenizer_config.json", settings)
    card = load_card(folder, "m")
    assert (card.bos_token, card.eos_token, card.chat_template) == ("<s>", "</s>", "T")


def test_of_several_chat_templates_the_default_is_taken_and_a_file_of_its_own_wins(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert load_card(folder, "m").chat_template == "plain"
    (folder / "chat_template.jinja").write_text("own file")
    assert load_card(folder, "m").chat_template == "own file"


def test_the_digest_is_stable_and_sees_each_part(folder: Path) -> None:
    seen = {model_digest(folder)}
    assert seen == {model_digest(folder)}
    assert load_card(folder, "one").digest == load_card(folder, "another").digest
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    seen.add(model_digest(folder))
    write(folder / "tokenizer.json", {"model": {"type": "Unigram"}})
    seen.add(model_digest(folder))
    write(folder / "config.json", {"vocab_size": 8})
    seen.add(model_digest(folder))
    write(folder / "tokenizer_config.json", {"chat_template": "x"})
    seen.add(model_digest(folder))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    seen.add(model_digest(folder))
    assert len(seen) == 6


def test_a_big_file_is_sampled_and_a_retrained_one_is_seen(folder: Path) -> None:
    size = 3 * NUM_WINDOWS * WINDOW_BYTES
    weights = folder / "model.safetensors"
    with open(weights, "wb") as file:
        file.truncate(size)
    before = model_digest(folder)
    with open(weights, "r+b") as file:
        for start in range(0, size, WINDOW_BYTES):
            file.seek(start)
            file.write(b"\1")
    assert model_digest(folder) != before


def test_with_an_index_only_its_files_count(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    write(folder / "model.safetensors.index.json", {"weight_map": {"a": "part-1.safetensors"}})
    before = model_digest(folder)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again, as Mistral ships them")
    assert model_digest(folder) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_or_malformed_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(RequestError, match=name):
        load_card(folder, "m")


def test_malformed_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(RequestError, match=r"config\.json is not JSON"):
        load_card(folder, "m")


def test_cards_need_neither_torch_nor_transformers(folder: Path) -> None:
    program = (
        "import sys; from services.engines.model_files import load_card; "
        f"load_card({str(folder)!r}, 'm'); print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
