"""Taking the connector's flag out of vLLM's words. vLLM itself is not needed."""

import pytest

from services.engines.vllm.launch import KV_FLAG, take_flag


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
