"""The operators of operators.py as fused kernels, on CPUs: one pass over the tokens each, float32 inside, and decode
attention that reads the pool in place."""

import ctypes
from typing import Any

import torch

from services.engines.torch.architecture import Architecture, Rope
from services.engines.torch.attention import GatheredAttention
from services.engines.torch.kernels import KernelsMissing, load_kernels
from services.engines.torch.operators import QkNorms, cosines_and_sines
from services.engines.torch.plan import StepPlan
from services.engines.torch.pool import KvPool
from services.engines.torch.reads import DecodeTables, Reads, decode_tables
from services.engines.torch.step import StepSlices

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
HEAD_DIMS = (32, 64, 96, 128, 256)
ROW_MULTIPLE = 32  # elements

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "attend": (None, [_P, _N, _P, _N, _N, _N, _N, _N, _F, _P, _N, _P, _P, _N, _P]),
    "rotate_and_store": (None, [_P, _P, _P, _P, _F, _P, _P, _P, _N, _N, _N, _N]),
    "add_and_norm": (None, [_P, _P, _P, _F, _N, _N, _P]),
    "gate": (None, [_P, _N, _N, _P]),
}


class FusedOperators:
    """See Operators. Raises KernelsMissing when this machine or this model can't have them, and says why."""

    def __init__(self, architecture: Architecture, rope: Rope, dtype: torch.dtype) -> None:
        _refuse_unfit(architecture, dtype)
        library = load_kernels()
        self._arch = architecture
        self._rope = rope
        self._attention = GatheredAttention(architecture.head_dim)
        self._attend, self._rotate_and_store, self._add_and_norm, self._gate = (
            _function(library, name, dtype) for name in SIGNATURES
        )

    def read_decodes(self, step: StepSlices, window: int | None) -> DecodeTables:
        """See Operators."""
        return decode_tables(step, window)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return them in float32."""
        return cosines_and_sines(positions, self._rope)

    def add_and_norm(self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See Operators."""
        out = torch.empty_like(hidden)
        self._add_and_norm(
            hidden.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            self._arch.norm_eps,
            *hidden.shape,
            out.data_ptr(),
        )
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: QkNorms | None, angles: torch.Tensor, plan: StepPlan, pool: KvPool, layer: int
    ) -> torch.Tensor:
        """Turn the queries in place; see Operators. The tails are for a peer, who may attend by another way."""
        arch = self._arch
        keys, values = pool.token_rows[layer].chunk(2)
        self._rotate_and_store(
            qkv.data_ptr(),
            angles.data_ptr(),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            arch.norm_eps,
            plan.key_rows.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            len(qkv),
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
        )
        if len(plan.tail_rows):
            values.index_fill_(0, plan.tail_rows, 0.0)
        return qkv[:, : arch.num_heads * arch.head_dim]

    def attend(self, queries: torch.Tensor, pool: KvPool, layer: int, reads: Reads) -> torch.Tensor:
        """See Operators."""
        out = torch.empty(queries.shape, dtype=queries.dtype)
        if len(reads.decodes.tables):
            self._decode(queries, pool, layer, reads.decodes, out)
        shape = (len(queries), self._arch.num_kv_heads, -1, self._arch.head_dim)
        for chunk in reads.chunks:
            self._attention.prefill(queries.view(shape), pool.block_rows[layer], chunk, out.view(shape))
        return out

    def _decode(
        self, queries: torch.Tensor, pool: KvPool, layer: int, decodes: DecodeTables, out: torch.Tensor
    ) -> None:
        arch = self._arch
        self._attend(
            queries.data_ptr(),
            queries.stride(0),
            pool.block_rows[layer].data_ptr(),
            pool.num_blocks,
            arch.num_kv_heads,
            arch.num_heads // arch.num_kv_heads,
            pool.layout.block_size,
            arch.head_dim,
            arch.head_dim**-0.5,
            decodes.tables.data_ptr(),
            decodes.tables.shape[1],
            decodes.firsts.data_ptr(),
            decodes.lasts.data_ptr(),
            len(decodes.tables),
            out.data_ptr(),
        )

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Operators."""
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty(len(gate_up), size)
        self._gate(gate_up.data_ptr(), len(gate_up), size, out.data_ptr())
        return out


def _refuse_unfit(arch: Architecture, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise KernelsMissing(f"not made for {dtype}: {', '.join(DTYPES.values())}")
    if arch.head_dim not in HEAD_DIMS:
        raise KernelsMissing(f"not made for head_dim {arch.head_dim}: {', '.join(map(str, HEAD_DIMS))}")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(arch, name) % ROW_MULTIPLE:
            raise KernelsMissing(f"not made for {name} {getattr(arch, name)}: multiples of {ROW_MULTIPLE}")


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Any:
    function = library[f"{name}_{DTYPES[dtype]}"]
    function.restype, function.argtypes = SIGNATURES[name]
    return function
