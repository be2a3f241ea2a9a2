"""The fused kernels compute what torch's operators do: in float32 the same, in bfloat16 nearer to float32."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from schemas.ids import new_attempt_id
from services.engines.paged.runner import Slice
from services.engines.torch import kernels
from services.engines.torch.architecture import Architecture, Rope
from services.engines.torch.fused import HEAD_DIMS, FusedOperators
from services.engines.torch.kernels import KernelsMissing, load_kernels
from services.engines.torch.operators import Operators, QkNorms, TorchOperators
from services.engines.torch.plan import StepPlan, plan_step
from services.engines.torch.pool import KvPool
from services.engines.torch.step import StepSlices
from services.kv.layout import KvLayout
from tests.engines.torch.driver import allocate

FLOAT32_GAP = 2e-5
CONTEXTS = [1, 2, 15, 16, 17, 100, 512, 513, 1300]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module", params=["native", "haswell"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """This CPU's own instructions, and AVX2's: half the vector."""
    if request.param == "haswell" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", (*kernels.FLAGS, f"-march={request.param}"))
        load_kernels.cache_clear()
        try:
            load_kernels()
        except KernelsMissing as reason:
            pytest.skip(str(reason))
        yield request.param
    load_kernels.cache_clear()


class Shape(NamedTuple):
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None


def an_architecture(shape: Shape) -> Architecture:
    return Architecture(
        name="LlamaForCausalLM",
        num_layers=2,
        hidden_size=96,
        intermediate_size=160,
        num_heads=2 * shape.group,
        num_kv_heads=2,
        head_dim=shape.head_dim,
        vocab_size=10,
        norm_eps=1e-5,
        windows=(shape.window, shape.window),
        has_qk_norm=True,
        is_tied=True,
        dtype="float32",
        max_context_tokens=2048,
    )


class Scene:
    """A step of sequences that decode behind contexts of random KV, by both kinds of operators."""

    def __init__(self, shape: Shape, dtype: torch.dtype, contexts: list[int]) -> None:
        torch.manual_seed(len(contexts) + shape.head_dim)
        arch = an_architecture(shape)
        rope = Rope(1.0 / 10000.0 ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim), 1.0)
        self.arch, self.window, self.dtype = arch, shape.window, dtype
        self.fused = FusedOperators(arch, rope, dtype)
        self.plain = TorchOperators(arch, rope, dtype, CPU)
        self.exact = TorchOperators(arch, rope, torch.float32, CPU)
        tables = _tables(contexts, shape.block_size)
        layout = KvLayout(
            num_layers=2,
            num_kv_heads=2,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize_bytes=dtype.itemsize,
        )
        self.pool = KvPool(layout, sum(map(len, tables)), CPU, allocate)
        self.pool.tensor.copy_(torch.randn(self.pool.tensor.shape))
        slices = [
            Slice(attempt_id=new_attempt_id(), token_ids=[1], start=context - 1, block_table=table, sample=None)
            for context, table in zip(contexts, tables, strict=True)
        ]
        self.step = StepSlices(slices, layout, self.pool.num_blocks, arch.num_heads, CPU)

    def plan(self, operators: Operators) -> StepPlan:
        return plan_step(self.step, {self.window}, operators.read_decodes)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(len(self.step.slices), *shape).to(self.dtype)

    def wide_pool(self) -> KvPool:
        """The pool in float32."""
        layout = KvLayout(
            num_layers=2,
            num_kv_heads=2,
            block_size=self.pool.layout.block_size,
            head_dim=self.arch.head_dim,
            dtype="float32",
            itemsize_bytes=4,
        )
        pool = KvPool(layout, self.pool.num_blocks, CPU, allocate)
        pool.tensor.copy_(self.pool.tensor)
        return pool


def _tables(contexts: list[int], block_size: int) -> list[list[int]]:
    sizes = [-(-context // block_size) for context in contexts]
    blocks = list(range(sum(sizes)))
    random.Random(3).shuffle(blocks)
    return [[blocks.pop() for _ in range(size)] for size in sizes]


def gap(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).abs().max())


SHAPES = [
    *(Shape(head_dim=head_dim) for head_dim in HEAD_DIMS),
    *(Shape(group=group) for group in (1, 2, 4, 5, 7, 8)),
    *(Shape(group=group, head_dim=128) for group in (1, 3, 8)),
    *(Shape(block_size=block_size) for block_size in (1, 4, 24, 32, 1024)),
    *(Shape(window=window, block_size=8) for window in (1, 5, 16, 600)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(shape: Shape, dtype: torch.dtype) -> None:
    scene = Scene(shape, dtype, CONTEXTS)
    queries = scene.random(scene.arch.num_heads * shape.head_dim)
    exact = scene.exact.attend(queries.float(), scene.wide_pool(), 1, scene.plan(scene.exact).reads[shape.window])
    found = scene.fused.attend(queries, scene.pool, 1, scene.plan(scene.fused).reads[shape.window])
    if dtype == torch.float32:
        assert gap(found, exact) < FLOAT32_GAP
    else:
        assert gap(found, exact) <= gap(exact.to(dtype), exact) * 1.01 + FLOAT32_GAP


@pytest.mark.parametrize("context", [3, 1300])
def test_attention_reads_no_token_behind_the_last(context: int) -> None:
    """Other sequences' KV may be anything, not a number among it."""
    scene = Scene(Shape(), torch.float32, [context])
    queries = scene.random(scene.arch.num_heads * 64)
    reads = scene.plan(scene.fused).reads[None]
    expected = scene.fused.attend(queries, scene.pool, 0, reads)
    last = scene.step.slices[0].block_table[-1]
    scene.pool.tensor[:, :, last, :, context % 16 :] = float("nan")
    assert torch.equal(scene.fused.attend(queries, scene.pool, 0, reads), expected)


def test_what_is_not_finite_stays_so() -> None:
    """A broken sequence must be seen as such, and alone."""
    scene = Scene(Shape(), torch.float32, [40, 41])
    scene.pool.tensor[:, 0, scene.step.slices[1].block_table[1], :, 3] = float("nan")
    queries = scene.random(scene.arch.num_heads * 64)
    found = scene.fused.attend(queries, scene.pool, 0, scene.plan(scene.fused).reads[None])
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("num_threads", [2, 3])
def test_attention_is_the_same_whatever_the_batch_and_the_threads(num_threads: int) -> None:
    scene = Scene(Shape(), torch.float32, CONTEXTS)
    queries = scene.random(scene.arch.num_heads * 64)
    reads = scene.plan(scene.fused).reads[None]
    together = scene.fused.attend(queries, scene.pool, 0, reads)
    for i in range(len(CONTEXTS)):
        tables = reads.decodes
        alone = reads._replace(decodes=type(tables)(*(rows[i : i + 1] for rows in tables)))
        assert torch.equal(scene.fused.attend(queries[i : i + 1], scene.pool, 0, alone)[0], together[i])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(scene.fused.attend(queries, scene.pool, 0, reads), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("shape", [Shape(head_dim=head_dim) for head_dim in HEAD_DIMS], ids=str)
def test_rotation_and_the_pool(shape: Shape, has_norms: bool) -> None:
    scene = Scene(shape, torch.float32, CONTEXTS)
    norms = QkNorms(torch.rand(shape.head_dim) + 0.5, torch.rand(shape.head_dim) + 0.5) if has_norms else None
    qkv = scene.random((scene.arch.num_heads + 4) * shape.head_dim)
    results = []
    for operators in (scene.plain, scene.fused):
        plan = scene.plan(operators)
        scene.pool.tensor.fill_(float("nan"))
        angles = operators.angles(plan.positions)
        queries = operators.rotate_and_store(qkv.clone(), norms, angles, plan, scene.pool, 1)
        results.append((queries, scene.pool.tensor.clone()))
    (queries, pool), (found_queries, found_pool) = results
    torch.testing.assert_close(found_queries, queries, rtol=0, atol=FLOAT32_GAP)
    torch.testing.assert_close(found_pool, pool, rtol=0, atol=FLOAT32_GAP, equal_nan=True)
    assert int(found_pool.isfinite().count_nonzero()) > len(CONTEXTS) * 4 * shape.head_dim  # tails are filled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 700])
def test_norms_and_gates(dtype: torch.dtype, num_rows: int) -> None:
    """One rounding from the exact result; a few rows, and enough for all threads."""
    scene = Scene(Shape(), dtype, [1])
    hidden, update = (torch.randn(num_rows, 96).to(dtype) for _ in range(2))
    weight = torch.randn(96).to(dtype)
    for more in (None, update):
        mine, exact = hidden.clone(), hidden.float() if more is None else (hidden + more).float()
        found = scene.fused.add_and_norm(mine, more, weight)
        assert torch.equal(mine.float(), exact)
        _is_rounded_once(found, scene.exact.add_and_norm(exact, None, weight.float()))
    gate_up = torch.cat([torch.randn(num_rows, 160) * 20, torch.randn(num_rows, 160)], dim=1).to(dtype)
    _is_rounded_once(scene.fused.gate(gate_up), scene.exact.gate(gate_up.float()))


def _is_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    ulp = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), exact, rtol=max(0.51 * ulp, 2e-6), atol=1e-6)


def test_models_and_dtypes_that_the_kernels_are_not_made_for_are_named() -> None:
    rope = Rope(torch.ones(32), 1.0)
    with pytest.raises(KernelsMissing, match="float16"):
        FusedOperators(an_architecture(Shape()), rope, torch.float16)
    with pytest.raises(KernelsMissing, match="head_dim 48: 32, 64"):
        FusedOperators(an_architecture(Shape(head_dim=48)), rope, torch.float32)
