"""The forward pass of a Llama-like decoder over a paged pool: Llama, Mistral, Qwen2, Qwen3."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from services.engines.torch.architecture import Architecture, Rope
from services.engines.torch.attention import PagedAttention
from services.engines.torch.linear import Linear
from services.engines.torch.plan import StepPlan
from services.engines.torch.pool import KvPool
from services.engines.torch.weights import Weights


class Layer(NamedTuple):
    """`qkv` yields queries, keys and values side by side; `gate_up` the MLP's gate and up. Qwen3 has the qk norms."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Model:
    """Weights and forward pass; knows neither requests nor blocks."""

    def __init__(self, architecture: Architecture, rope: Rope, weights: Weights) -> None:
        self.architecture = architecture
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
        self._inv_freq = rope.inv_freq.to(self._embedding.device)
        self._rope_scaling = rope.scaling
        self._paged_attention = PagedAttention(arch.head_dim)

    def forward(self, plan: StepPlan, pool: KvPool) -> torch.Tensor:
        """Write the step's K and V into the pool; return float32 logits [len(plan.sample_rows), vocab_size]."""
        hidden = F.embedding(plan.token_ids, self._embedding)
        cos_sin = self._angles(plan.positions)
        for index, layer in enumerate(self._layers):
            hidden += self._attention(self._normed(hidden, layer.input_norm), layer, index, cos_sin, plan, pool)
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        wanted = hidden.index_select(0, plan.sample_rows)
        return self._head(self._normed(wanted, self._norm)).float()

    def _attention(
        self,
        x: torch.Tensor,
        layer: Layer,
        index: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        plan: StepPlan,
        pool: KvPool,
    ) -> torch.Tensor:
        arch = self.architecture
        qkv = layer.qkv(x).view(x.shape[0], -1, arch.head_dim)
        rotary, values = qkv.split([arch.num_heads + arch.num_kv_heads, arch.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotary.split([arch.num_heads, arch.num_kv_heads], dim=1)
            rotary = torch.cat([self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)], dim=1)
        queries, keys = _rotated(rotary, *cos_sin).split([arch.num_heads, arch.num_kv_heads], dim=1)
        _write(pool.token_rows[index], plan, keys, values)
        grouped = (queries * arch.head_dim**-0.5).view(x.shape[0], arch.num_kv_heads, -1, arch.head_dim)
        found = self._paged_attention.attend(grouped, pool.block_rows[index], plan.reads[layer.window])
        return layer.out(found.view(x.shape[0], -1))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [num_tokens, 1, head_dim / 2], in the model's dtype."""
        angles = (positions[:, None].float() * self._inv_freq)[:, None, :]
        dtype = self._embedding.dtype
        return (angles.cos() * self._rope_scaling).to(dtype), (angles.sin() * self._rope_scaling).to(dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [num_tokens, heads, head_dim] by its angle."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (low, high), (out_low, out_high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
    return out


def _write(token_rows: torch.Tensor, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put this step's keys and values [num_tokens, kv_heads, head_dim] into one layer of the pool."""
    half, head_dim = token_rows.shape[0] // 2, token_rows.shape[1]
    token_rows[:half].index_copy_(0, plan.key_rows, keys.reshape(-1, head_dim))
    token_rows[half:].index_copy_(0, plan.key_rows, values.reshape(-1, head_dim))
    if len(plan.tail_rows):
        token_rows[half:].index_fill_(0, plan.tail_rows, 0.0)


def _load_layer(arch: Architecture, weights: Weights, index: int) -> Layer:
    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"model.layers.{index}.{name}.weight", (size,))

    def linear(names: list[str], out_sizes: list[int], in_size: int) -> Linear:
        return _load_linear(weights, [f"model.layers.{index}.{name}" for name in names], out_sizes, in_size)

    hidden, queries, keys = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(qkv, [queries, keys, keys], hidden),
        query_norm=norm("self_attn.q_norm", arch.head_dim) if arch.has_qk_norm else None,
        key_norm=norm("self_attn.k_norm", arch.head_dim) if arch.has_qk_norm else None,
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
