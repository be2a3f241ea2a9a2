"""What the engine can't honour is refused by name, before anything is computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.errors import RequestError
from services.engines.torch.args import parse_engine_args
from services.engines.torch.runner import TorchRunner
from tests.engines.torch.driver import allocate
from tests.engines.torch.tiny import make_tiny

ARGS = {"device": "cpu", "dtype": "float32", "num_blocks": "20"}


def load(folder: Path) -> None:
    TorchRunner(folder, "tiny", ARGS).load(allocate)


def changed_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"intermediate_size": 81}, "mlp"),
        ({"num_hidden_layers": 2}, "layers.2"),
        ({"num_hidden_layers": 4}, "layers.3"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_a_model_with_an_unknown_feature_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    make_tiny("llama", tmp_path)
    changed_config(tmp_path, **changes)
    with pytest.raises(RequestError, match=named):
        load(tmp_path)


def test_tensors_that_the_engine_would_ignore_are_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(6)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="sinks"):
        load(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(RequestError, match="safetensors"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("engine_args", "named"),
    [
        ({"dtpye": "float32"}, "dtpye"),
        ({"dtype": "int8"}, "int8"),
        ({"threads": "many"}, "threads"),
        ({"threads": "-1"}, "threads"),
        ({"block_size": "0"}, "block_size"),
        ({"device": "tpu"}, "device"),
        ({"memory_fraction": "1.5"}, "memory_fraction"),
        ({"max_num_seqs": "2.5"}, "max_num_seqs"),
    ],
)
def test_a_bad_engine_argument_is_refused_by_name(tiny_llama: Path, engine_args: dict[str, str], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        TorchRunner(tiny_llama, "tiny", engine_args)


def test_an_absent_device_is_refused(tiny_llama: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RequestError, match="no CUDA device"):
        TorchRunner(tiny_llama, "tiny", {"device": "cuda:0"})


def test_a_pool_too_small_for_one_block_is_refused(tiny_llama: Path) -> None:
    runner = TorchRunner(tiny_llama, "tiny", {"device": "cpu", "kv_memory_gib": "0.000001"})
    with pytest.raises(RequestError, match="KV block"):
        runner.load(allocate)


def test_arguments_are_read_from_strings() -> None:
    args = parse_engine_args({"dtype": "bfloat16", "threads": "2", "kv_memory_gib": "0.5", "block_size": "32"})
    assert (args.dtype, args.threads, args.kv_memory_gib, args.block_size) == ("bfloat16", 2, 0.5, 32)


def test_limits_follow_from_arguments_pool_and_model(tiny_llama: Path) -> None:
    args = {"device": "cpu", "num_blocks": "10", "max_num_seqs": "3", "max_batched_tokens": "99", "block_size": "8"}
    spec = TorchRunner(tiny_llama, "served", args).load(allocate)
    assert (spec.num_blocks, spec.max_num_seqs, spec.max_batched_tokens, spec.max_context_tokens) == (10, 3, 99, 80)
    assert spec.card.model == "served"
    roomy = TorchRunner(tiny_llama, "served", {"device": "cpu", "num_blocks": "1000"}).load(allocate)
    assert roomy.max_context_tokens == 512
    limited = TorchRunner(tiny_llama, "served", {"device": "cpu", "max_context_tokens": "33"}).load(allocate)
    assert limited.max_context_tokens == 33
    assert limited.num_blocks == 2**30 // limited.layout.block_bytes
