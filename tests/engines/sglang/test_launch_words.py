"""Which of SGLang's flags are busway's. SGLang itself is not needed."""

import pytest

from schemas.errors import RequestError
from services.engines.sglang.launch import refuse_ours


@pytest.mark.parametrize(
    "words", [("--disaggregation-mode", "decode"), ("--model-path=x",), ("--tp-size", "2", "--skip_tokenizer_init")]
)
def test_what_busway_decides_is_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="is busway's to set"):
        refuse_ours(words)


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--disaggregation-mo", "--disaggregation-mode"),
        ("--disaggregation-m=decode", "--disaggregation-mode"),
        ("--model-pa", "--model-path"),
        ("--skip_tok", "--skip-tokenizer-init"),
        ("--tokenizer-w", "--tokenizer-worker-num"),
    ],
)
def test_ours_for_short_is_refused_by_its_whole_name(word: str, flag: str) -> None:
    """argparse would take it, and ours, behind it, would win without a word."""
    with pytest.raises(RequestError, match=f"{flag} \\(.* for short\\) is busway's to set"):
        refuse_ours(("--tp-size", "2", word, "x"))


@pytest.mark.parametrize("word", ["--config", "--config=x.yaml", "--confi"])
def test_a_file_that_nobody_would_read_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match=r"--config.* is not read here"):
        refuse_ours((word, "x.yaml"))


def test_the_rest_is_sglangs() -> None:
    refuse_ours(("--tp-size", "2", "--disaggregation-bootstrap-port", "8998", "--model-loader-extra-config", "{}"))
    refuse_ours(("--tokenizer-path", "-", "--", "decode", "--model-impl=auto", "--context-length=9"))
