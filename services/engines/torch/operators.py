"""What a layer computes besides its linears, and how with torch's own operators, on any device.

fused.py computes the same on CPUs with kernels of our own.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from services.engines.torch.architecture import Architecture, Rope
from services.engines.torch.attention import GatheredAttention
from services.engines.torch.plan import StepPlan
from services.engines.torch.pool import KvPool
from services.engines.torch.reads import DecodeGroup, Reads, decode_groups
from services.engines.torch.step import StepSlices


class QkNorms(NamedTuple):
    """Weights [head_dim] of the norms that Qwen3 gives queries and keys."""

    query: torch.Tensor
    key: torch.Tensor


class Operators(Protocol):
    """The operators of one model. Tensors are [num_tokens, ...] in its dtype."""

    def read_decodes(self, step: StepSlices, window: int | None) -> Any:
        """Return what the decoding sequences read, for `attend` (Reads.decodes)."""
        ...

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [num_tokens, head_dim], side by side, in the dtype that this class wants."""
        ...

    def add_and_norm(self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Add `update` to `hidden`, in place, and return the sum's RMS norm."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: QkNorms | None, angles: torch.Tensor, plan: StepPlan, pool: KvPool, layer: int
    ) -> torch.Tensor:
        """Norm and turn the queries and keys in `qkv` [num_tokens, (heads + 2 kv_heads) * head_dim], write keys and
        values into the pool, return the queries [num_tokens, heads * head_dim]. `qkv` may be changed."""
        ...

    def attend(self, queries: torch.Tensor, pool: KvPool, layer: int, reads: Reads) -> torch.Tensor:
        """Return [num_tokens, heads * head_dim]; this step's keys and values are written."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of [num_tokens, 2 * intermediate_size]."""
        ...


class TorchOperators:
    """See Operators."""

    def __init__(self, architecture: Architecture, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._arch = architecture
        self._rope = Rope(rope.inv_freq.to(device), rope.scaling)
        self._dtype = dtype
        self._attention = GatheredAttention(architecture.head_dim)

    def read_decodes(self, step: StepSlices, window: int | None) -> list[DecodeGroup]:
        """See Operators."""
        return decode_groups(step, window)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return them in the model's dtype, as transformers does."""
        return cosines_and_sines(positions, self._rope).to(self._dtype)

    def add_and_norm(self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See Operators."""
        if update is not None:
            hidden += update
        return self._normed(hidden, weight)

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: QkNorms | None, angles: torch.Tensor, plan: StepPlan, pool: KvPool, layer: int
    ) -> torch.Tensor:
        """See Operators."""
        num_heads, num_kv_heads = self._arch.num_heads, self._arch.num_kv_heads
        heads = qkv.view(len(qkv), -1, self._arch.head_dim)
        rotary, values = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            queries, keys = rotary.split([num_heads, num_kv_heads], dim=1)
            rotary = torch.cat([self._normed(queries, norms.query), self._normed(keys, norms.key)], dim=1)
        queries, keys = _rotated(rotary, angles[:, None, :]).split([num_heads, num_kv_heads], dim=1)
        _write(pool.token_rows[layer], plan, keys, values)
        return queries.reshape(len(qkv), -1)

    def attend(self, queries: torch.Tensor, pool: KvPool, layer: int, reads: Reads) -> torch.Tensor:
        """See Operators."""
        grouped = queries.view(len(queries), self._arch.num_kv_heads, -1, self._arch.head_dim)
        out = torch.empty_like(grouped)
        for group in reads.decodes:
            self._attention.decode(grouped, pool.block_rows[layer], group, out)
        for chunk in reads.chunks:
            self._attention.prefill(grouped, pool.block_rows[layer], chunk, out)
        return out.view(queries.shape)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Operators."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._arch.norm_eps)


def cosines_and_sines(positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return them [num_tokens, head_dim] side by side, float32."""
    angles = positions[:, None].float() * rope.inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.scaling


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [num_tokens, heads, head_dim] by its angle."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (cos, sin), (low, high), (out_low, out_high) = (t.chunk(2, dim=-1) for t in (angles, x, out))
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
