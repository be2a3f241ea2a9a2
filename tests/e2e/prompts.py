"""Twenty varied prompts of 1 to 2,000 tokens, and transformers' own greedy answers to them."""

import functools
import random
from pathlib import Path

from tokenizers import Tokenizer

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 64, 100, 127, 200, 256, 300, 511, 700, 1000, 1500, 2000)
QUICK_LENGTHS = (1, 16, 33, 127, 300)

TEXTS = (
    "The history of the railway begins with horses. In 1804 a steam engine ran on rails in Wales, and by 1830 ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n",
    "Q: What is 17 + 25?\nA: 42\nQ: What is the capital of Italy?\nA: Rome\nQ: Who wrote Hamlet?\nA:",
    "Größe, naïve café, 東京, здравствуйте, 🙂 and ½ are all words of someone; ",
    '{"name": "busway", "items": [1, 2, 3], "nested": {"key": "value"}}, ',
)


def prompt_ids(tokenizer: Tokenizer, length: int) -> list[int]:
    """Return exactly `length` ids of natural text, different for each length."""
    rng = random.Random(length)
    text = ""
    while True:
        text += rng.choice(TEXTS) + str(rng.randrange(1000)) + " "
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= length:
            return ids[:length]


class Reference:
    """Transformers' greedy generation in float32, the third party both arrangements must agree with."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(2)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.eval()

    @functools.cache  # noqa: B019 one reference a session
    def greedy(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Return the completion's ids, EOS included where it ends one."""
        import torch

        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
            )
        return tuple(out[0, len(ids) :].tolist())
