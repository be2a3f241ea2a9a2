"""What of vLLM's words is busway's: the connector's flag is taken out, the model refused. vLLM itself is not needed."""

import pytest

from schemas.errors import RequestError
from services.engines.vllm.launch import KV_FLAG, refuse_ours, take_flag


@pytest.mark.parametrize(
    "words",
    [
        ("--a", "1", KV_FLAG, "{}", "--b"),
        ("--a", "1", KV_FLAG + "={}", "--b"),
        ("--a", "1", "--kv_transfer_config", "{}", "--b"),
    ],
)
def test_a_flag_is_taken_out_however_it_is_written(words: tuple[str, ...]) -> None:
    assert take_flag(words, KV_FLAG) == (["--a", "1", "--b"], "{}")


def test_words_without_it_stay_as_they_are() -> None:
    assert take_flag(("--a=b", "c"), KV_FLAG) == (["--a=b", "c"], None)


@pytest.mark.parametrize(
    "word", ["--model", "--model=/m", f"{KV_FLAG}.kv_connector", f"{KV_FLAG}.kv_connector=X", "--kv_transfer_config.x"]
)
def test_words_that_busways_own_would_replace_are_refused_by_name(word: str) -> None:
    with pytest.raises(RequestError, match=word.partition("=")[0].replace("_", "-")[:20]):
        refuse_ours(("--dtype", "float32", word, "x"))
    refuse_ours(("--model-impl", "auto", "--dtype=float32", KV_FLAG, '{"a": "--model"}'))
