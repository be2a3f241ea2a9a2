"""The built-in model's tokenizer and template, as the gateway uses them."""

import jinja2
import pytest
from tokenizers import Tokenizer

from services.engines.sim.card import SPECIAL_TOKENS, WORDS, builtin_card, builtin_word_ids

CARD = builtin_card()
TOKENIZER = Tokenizer.from_str(CARD.tokenizer_json)

TEXTS = ["", "hello there", " Ünïcödé 漢字 🙂\n\ttabs", "river stone! (water)", "a" * 300, "\x00\x7f"]


def test_the_digest_is_the_models_and_not_the_names() -> None:
    assert builtin_card("other").digest == CARD.digest == builtin_card().digest
    assert builtin_card("other").model == "other"
    assert CARD.digest == "6ef9446b3d2858f1747debb5b30a04f2b26c35e8fe2ab2b7c3e65655b1f14317", (
        "a new vocabulary is a new model: workers of both never pair"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_every_generated_id_reads_as_a_word_and_encodes_back_to_itself() -> None:
    ids = builtin_word_ids()
    assert len(set(ids)) == len(WORDS) == len(set(WORDS)) > 200
    text = TOKENIZER.decode(ids)
    assert text.split() == list(WORDS)
    assert TOKENIZER.encode(text).ids == ids


def test_ids_are_dense_and_the_special_ones_are_what_the_card_says() -> None:
    assert TOKENIZER.get_vocab_size() == CARD.vocab_size
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(CARD.vocab_size))
    assert [TOKENIZER.id_to_token(i) for i in CARD.eos_token_ids] == [CARD.eos_token, CARD.bos_token]
    assert TOKENIZER.decode(list(range(len(SPECIAL_TOKENS)))) == ""


def test_the_chat_template_is_chatml_and_its_marks_are_single_tokens() -> None:
    template = jinja2.Template(CARD.chat_template)
    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert (ids.count(1), ids.count(2)) == (2, 1)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
