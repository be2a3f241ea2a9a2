"""The forward pass of a Llama-like decoder over a paged pool: Llama, Mistral, Qwen2, Qwen3."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from services.engines.torch.architecture import Architecture
from services.engines.torch.linear import Linear
from services.engines.torch.operators import Operators, QkNorms
from services.engines.torch.plan import StepPlan
from services.engines.torch.pool import KvPool
from services.engines.torch.weights import Weights


class Layer(NamedTuple):
    """`qkv` yields queries, keys and values side by side; `gate_up` the MLP's gate and up."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: QkNorms | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Model:
    """Weights and forward pass; knows neither requests nor blocks."""

    def __init__(self, architecture: Architecture, weights: Weights, operators: Operators) -> None:
        self.architecture = architecture
        self.operators = operators
        arch = architecture
        embedding_shape = (arch.vocab_size, arch.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", embedding_shape)
        self._layers = [_load_layer(arch, weights, i) for i in range(arch.num_layers)]
        self._norm = weights.take("model.norm.weight", (arch.hidden_size,))
        if arch.is_tied:
            weights.drop("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(weights.take("lm_head.weight", embedding_shape))
        weights.finish()

    def forward(self, plan: StepPlan, pool: KvPool) -> torch.Tensor:
        """Write the step's K and V into the pool; return float32 logits [len(plan.sample_rows), vocab_size]."""
        ops = self.operators
        hidden, update = F.embedding(plan.token_ids, self._embedding), None
        angles = ops.angles(plan.positions)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.add_and_norm(hidden, update, layer.input_norm))
            queries = ops.rotate_and_store(qkv, layer.qk_norms, angles, plan, pool, index)
            update = layer.out(ops.attend(queries, pool, index, plan.reads[layer.window]))
            gate_up = layer.gate_up(ops.add_and_norm(hidden, update, layer.mlp_norm))
            update = layer.down(ops.gate(gate_up))
        normed = ops.add_and_norm(hidden, update, self._norm)
        return self._head(normed.index_select(0, plan.sample_rows)).float()


def _load_layer(arch: Architecture, weights: Weights, index: int) -> Layer:
    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"model.layers.{index}.{name}.weight", (size,))

    def linear(names: list[str], out_sizes: list[int], in_size: int) -> Linear:
        return _load_linear(weights, [f"model.layers.{index}.{name}" for name in names], out_sizes, in_size)

    hidden, queries, keys = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    norms = QkNorms(*(norm(f"self_attn.{name}_norm", arch.head_dim) for name in "qk")) if arch.has_qk_norm else None
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(qkv, [queries, keys, keys], hidden),
        qk_norms=norms,
        out=linear(["self_attn.o_proj"], [hidden], queries),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [arch.intermediate_size] * 2, hidden),
        down=linear(["mlp.down_proj"], [hidden], arch.intermediate_size),
        window=arch.windows[index],
    )


def _load_linear(weights: Weights, names: list[str], out_sizes: list[int], in_size: int) -> Linear:
    """Return these layers as one, their outputs side by side; a bias is used where the checkpoint has one."""
    matrices, biases = [], []
    for name, out_size in zip(names, out_sizes, strict=True):
        matrices.append(weights.take(f"{name}.weight", (out_size, in_size)))
        biases.append(weights.take_if_there(f"{name}.bias", (out_size,)))
    if all(bias is None for bias in biases):
        return Linear(torch.cat(matrices))
    filled = [m.new_zeros(m.shape[0]) if b is None else b for m, b in zip(matrices, biases, strict=True)]
    return Linear(torch.cat(matrices), torch.cat(filled))
