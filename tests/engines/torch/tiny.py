"""Tiny random models of each architecture, made by transformers: the reference and, saved, the engine's input."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 307
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN_ROPE}),
    "llama-linear-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 11, "head_dim": 64}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-mixed-windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3-odd-heads": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 20}),  # which the fused kernels aren't made for
}


def make_tiny(kind: str, folder: Path, seed: int = 1) -> Any:
    """Save a random model of this kind in `folder` and return it: float32, in evaluation mode."""
    config_class, model_class, extra = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**SHAPE | extra)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: made as ones and zeros, which would hide that they are lost
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one word for each id."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def greedy_reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return transformers' own greedy continuation; it ends early at the model's EOS, if it has one."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return list(out[0, len(prompt) :].tolist())
