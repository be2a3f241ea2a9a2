"""Model folders with the sim model's tokenizer: a Llama with random weights, small enough that an engine starts in
seconds, and one without weights."""

import json
from pathlib import Path

from schemas.model_card import ModelCard
from services.engines.sim.card import builtin_card
from tests.conformance.prompts import prompt

NUM_LAYERS = 2
ENDING_PROMPT = prompt(50, salt=900)
"""Whose greedy completion by the tiny Llama ends at once: its first id is one of the model's EOS."""


def write_tiny_llama(folder: Path, seed: int = 5) -> Path:
    """Write a model folder: float32, wide enough weights that greedy ids vary and rarely tie.
    `ENDING_PROMPT` ends at once, where EOS isn't ignored."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    card = builtin_card()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=card.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.4,
        eos_token_id=list(card.eos_token_ids),
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        ending_id = int(model(torch.tensor([ENDING_PROMPT])).logits[0, -1].argmax())
    config.eos_token_id = model.generation_config.eos_token_id = [*card.eos_token_ids, ending_id]
    model.save_pretrained(folder)
    _write_tokenizer(folder, card)
    return folder


def write_card(folder: Path) -> Path:
    """Write all that a gateway needs of the sim model, and no weights."""
    card = builtin_card()
    folder.mkdir()
    config = {"vocab_size": card.vocab_size, "max_position_embeddings": 2048, "eos_token_id": list(card.eos_token_ids)}
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, card)
    return folder


def _write_tokenizer(folder: Path, card: ModelCard) -> None:
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    settings = {"chat_template": card.chat_template, "eos_token": card.eos_token, "bos_token": card.bos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
