"""From a GGUF file to a Hugging Face folder, by transformers; run as a program of its own so that torch stays out of
the process that shows the progress bar.

`python -m deploy.models.convert GGUF FOLDER MAX_CONTEXT SAMPLING_JSON` prints the name of each step as it starts it.
"""

import json
import sys
from pathlib import Path
from typing import Any

STEPS = ("importing transformers", "reading the tokenizer", "dequantizing the weights", "writing the model")

# GGUF pre-tokenizers that split off each digit before the GPT-2 pattern (llama.cpp's llama-vocab.cpp: \p{N} first).
# transformers 5.24 drops this when it reads a GGUF: two spaces before a digit would then differ from the training.
DIGIT_SPLITTING = frozenset({"smollm"})


def convert(gguf: Path, folder: Path, max_context_tokens: int, sampling: dict[str, Any]) -> None:
    """Write config, tokenizer, chat template, generation config and bfloat16 safetensors of `gguf` into `folder`.

    `sampling` goes into the generation config.
    """
    _step(0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _step(1)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _write_tokenizer(tokenizer, _pre_tokenizer_name(gguf), folder, max_context_tokens)
    _step(2)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    _step(3)
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    _clean_config(folder / "config.json")
    generation = folder / "generation_config.json"
    _write_json(generation, json.loads(generation.read_text()) | {"do_sample": True} | sampling)


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


def _write_tokenizer(tokenizer: Any, pre_tokenizer: str, folder: Path, max_context_tokens: int) -> None:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if pre_tokenizer in DIGIT_SPLITTING:
        digits = {"type": "Digits", "individual_digits": True}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    } | dict(tokenizer.special_tokens_map)
    _write_json(folder / "tokenizer_config.json", settings)


def _clean_config(path: Path) -> None:
    """Strip what is true of the GGUF only, and undo float32 roundings (9.9999997e-06 is 1e-05)."""
    import numpy as np

    config = json.loads(path.read_text())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    _write_json(path, config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _step(index: int) -> None:
    print(STEPS[index], flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
