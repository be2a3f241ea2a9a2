"""Which models the engine computes, and their shape: read from a transformers config, everything else refused by name.

A wrong guess here is wrong text with a 200, so the rule is: what isn't known to be honoured is an error.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch

from schemas.errors import RequestError
from services.engines.model_files import read_json

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SCALED_ROPES = ("linear", "llama3", "yarn")  # the others depend on the sequence's length, or rotate a part only
LAYER_TYPES = ("full_attention", "sliding_attention")
MUST_BE_UNSET = ("quantization_config", "attn_logit_softcapping", "final_logit_softcapping", "num_local_experts")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama-like decoder: RMS norms before attention and MLP, rotary positions, grouped queries, SwiGLU.

    `windows[layer]` is how many tokens a query sees, itself included (None: all before it).
    `dtype` is the checkpoint's own.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    windows: tuple[int | None, ...]
    has_qk_norm: bool
    is_tied: bool
    dtype: str
    max_context_tokens: int


class Rope(msgspec.Struct, frozen=True):
    """Rotary positions: the angle of pair i at position p is p * inv_freq[i]; cos and sin are scaled."""

    inv_freq: Any  # float32 [head_dim / 2], on the CPU
    scaling: float


def read_architecture(folder: Path) -> tuple[Architecture, Rope]:
    """Return what the model in `folder` is; raises RequestError naming what the engine can't honour."""
    names = read_json(folder / "config.json").get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED:
        raise _refusal(f"architecture {names[0]}; it computes {', '.join(SUPPORTED)}")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _refuse_unknown_features(config)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    architecture = Architecture(
        name=names[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        windows=_windows(names[0], config),
        has_qk_norm=names[0] == "Qwen3ForCausalLM",
        is_tied=bool(config.tie_word_embeddings),
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        max_context_tokens=config.max_position_embeddings,
    )
    return architecture, _rope(config, head_dim)


def _refuse_unknown_features(config: Any) -> None:
    if config.hidden_act != "silu":
        raise _refusal(f"hidden_act {config.hidden_act!r}, only 'silu'")
    for feature in MUST_BE_UNSET:
        if getattr(config, feature, None) is not None:
            raise _refusal(f"{feature} ({getattr(config, feature)!r})")


def _windows(name: str, config: Any) -> tuple[int | None, ...]:
    """Return each layer's window, by transformers' rules for each architecture (5.24, modeling_*.py)."""
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if name == "LlamaForCausalLM":
        return tuple([None] * num_layers)
    if name == "MistralForCausalLM":
        return tuple([window] * num_layers)
    layer_types = config.layer_types
    if len(layer_types) != num_layers or not set(layer_types) <= set(LAYER_TYPES):
        raise _refusal(f"layer_types {layer_types!r}")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _rope(config: Any, head_dim: int) -> Rope:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _rope_parameters(config)
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refusal(f"partial_rotary_factor {parameters['partial_rotary_factor']}")
    if rope_type in SCALED_ROPES:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    elif rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq, scaling = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        raise _refusal(f"rope type {rope_type!r}; it knows default, {', '.join(SCALED_ROPES)}")
    if inv_freq.shape != (head_dim // 2,):
        raise _refusal(f"rotary positions over {2 * inv_freq.numel()} of {head_dim} dimensions")
    return Rope(inv_freq.float(), float(scaling))


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Return the config's rope settings in transformers 5's form; 4 keeps theta and scaling apart."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:
        return dict(parameters)
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    return scaling | {"rope_theta": config.rope_theta, "rope_type": rope_type}


def _refusal(what: str) -> RequestError:
    return RequestError(f"the torch engine doesn't support {what}", param="model")
