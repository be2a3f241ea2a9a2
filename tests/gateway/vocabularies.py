"""Tokenizers for tests: small ones built here, of the kinds that checkpoints have, and a real one if it is cached."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Größe, naïve café, привет мир, 日本語のテキスト, 한국어, 🙂🙃👩‍👩‍👧‍👦 e\u0301",
    "def f(x):\n    return x + 1\n\n\tprint('hello')  # comment",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IM_END = 1


@cache
def byte_level_json() -> str:
    """GPT-2's kind, as Llama 3, Qwen and SmolLM2 have; ids 0 and 1 are <|im_start|> and <|im_end|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words", special=False)])
    return tokenizer.to_str()


@cache
def byte_fallback_json() -> str:
    """SentencePiece's kind with bytes as a last resort, as Llama 2 and Mistral have; adds <s> in front."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=True, fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *byte_tokens], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator([TEXTS[0], TEXTS[2]], trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return _with_plain_byte_tokens(tokenizer.to_str(), byte_tokens)


@cache
def metaspace_json() -> str:
    """Unigram with Metaspace, as T5 and XLM-R have."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


@cache
def word_piece_json() -> str:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=[*SPECIAL, "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def cached_json(model: str = "smollm2-135m-instruct") -> str | None:
    """Return the real tokenizer of a model in busway's cache, None where it isn't there."""
    path = Path.home() / ".cache" / "busway" / "models" / model / "tokenizer.json"
    return path.read_text() if path.is_file() else None


def all_kinds() -> dict[str, str]:
    """Return every tokenizer there is to test with."""
    kinds = {
        "byte_level": byte_level_json(),
        "byte_fallback": byte_fallback_json(),
        "metaspace": metaspace_json(),
        "word_piece": word_piece_json(),
    }
    real = cached_json()
    return kinds | ({"smollm2": real} if real else {})


def _with_plain_byte_tokens(tokenizer_json: str, byte_tokens: list[str]) -> str:
    """Make the byte tokens part of the vocabulary only: as added tokens they would be found in plain text."""
    settings = json.loads(tokenizer_json)
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in byte_tokens]
    return json.dumps(settings)
