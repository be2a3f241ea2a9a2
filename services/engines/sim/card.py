"""The sim engine's built-in model: a byte-level BPE tokenizer of its own, whose generated ids all read as words.

Any text encodes losslessly as bytes; the words below, with their leading space, are single tokens (their merges go
letter by letter, so decoding generated ids and encoding the text again gives the same ids).
"""

import hashlib
import json
from functools import cache

from schemas.model_card import ModelCard

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS_TEXT = """
acorn alder amber anchor apple apron arch arrow aspen atlas autumn badge baker bamboo barley basin basket beach
beacon bell berry birch bird blanket blossom blue boat bottle branch bread breeze brick bridge bright brook brush
bucket butter button cabin cable camel canal candle canyon carbon carpet castle cedar chain chalk cherry chimney
circle citrus clay cliff clock cloud clover coal coast cobalt comet compass copper coral cotton cradle crane creek
crystal curtain cypress dawn desert diamond dolphin dove dragon drift drum dune eagle early earth echo ember
engine evening falcon feather fern ferry field finch flame flint flower flute fog forest fountain fox frost
garden gate ginger glacier glass globe gold grain granite grape grass gravel green grove guitar gull hammer harbor
harp harvest hazel heron hill honey horizon horse hour house indigo ink iron island ivory ivy jacket jade jasmine
jewel journey juniper kettle key kite ladder lake lamp lantern lark laurel lavender leaf lemon letter light lilac
lime linen lion lotus lunar lute magnet maple marble market marsh meadow melon mercury metal midnight mill mint
mirror mist moon morning moss motor mountain needle nest night north nutmeg oak oasis ocean olive onyx opal
orange orbit orchard otter owl oyster paddle palm paper path peach pearl pebble pepper piano pigeon pillow pine
planet plum pocket pond poplar poppy prairie prism quartz quiet quill quilt rabbit rail rain raven reed reef ribbon
ridge river road robin rocket roof root rope rose ruby saddle saffron sage sail salmon salt sand sapphire sea seed
shadow shell shore silk silver sky slate smoke snow song south sparrow spice spring spruce star steam steel stone
storm stream summer sun swan table tea thimble thistle thunder tide tiger timber topaz torch tower train tulip
tunnel turtle valley velvet violet violin walnut water wave west wheat wheel whistle willow wind window winter
wolf wood wool yarrow yellow zenith zinc
"""
WORDS = tuple(_WORDS_TEXT.split())


def builtin_card(model: str = "sim") -> ModelCard:
    """Return the built-in model's card under this served name; its digest depends on the model alone."""
    vocab, merges = _vocab_and_merges()
    tokenizer_json = _tokenizer_json(vocab, merges)
    digest = hashlib.sha256(f"busway.sim.v1\0{tokenizer_json}\0{CHAT_TEMPLATE}".encode()).hexdigest()
    return ModelCard(
        model=model,
        digest=digest,
        tokenizer_json=tokenizer_json,
        chat_template=CHAT_TEMPLATE,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        eos_token_ids=(2, 0),
        max_context_tokens=0,
        vocab_size=len(vocab) + len(SPECIAL_TOKENS),
    )


def builtin_word_ids() -> list[int]:
    """Return the ids that the built-in model generates: one for each of WORDS."""
    vocab, _ = _vocab_and_merges()
    return [vocab["Ġ" + word] for word in WORDS]


def _byte_letters() -> list[str]:
    """Return the printable stand-ins of the 256 bytes (the mapping of GPT-2's byte-level BPE)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, num_shifted = [], 0
    for byte in range(256):
        letters.append(chr(byte if byte in printable else 256 + num_shifted))
        num_shifted += byte not in printable
    return letters


@cache
def _vocab_and_merges() -> tuple[dict[str, int], list[list[str]]]:
    vocab = {letter: len(SPECIAL_TOKENS) + byte for byte, letter in enumerate(_byte_letters())}
    merges = []
    for word in WORDS:
        grown = "Ġ"
        for letter in word:
            if grown + letter not in vocab:
                vocab[grown + letter] = len(SPECIAL_TOKENS) + len(vocab)
                merges.append([grown, letter])
            grown += letter
    return vocab, merges


def _tokenizer_json(vocab: dict[str, int], merges: list[list[str]]) -> str:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(SPECIAL_TOKENS)} | vocab,
            "merges": merges,
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
