"""Every kernel in Triton's interpreter, at small odd sizes, against the torch code and float64."""

import pytest
import torch
import triton
import triton.language as tl

from quads_common.kernels import _units, moe
from quads_common.kernels import quantize as weight_kernels
from quads_common.kernels import rows as row_kernels
from quads_common.kernels.units import UnitQuantizer
from quads_common.ops import quads_linear, quads_moe
from quads_common.weight_units import Piece
from tests.kernels import (
    compare_edges,
    compare_gemm,
    compare_quantize,
    compare_units,
    compare_variants,
)
from tests.kernels.exact import random_rows, random_weight

# H, I, experts, top_k
SHAPES = {"small": (160, 48, 4, 2)}
GROUPS = [
    compare_quantize.weights,
    compare_quantize.weight_storage,
    compare_quantize.same_answers,
    compare_quantize.tokens,
    compare_quantize.activations,
    compare_quantize.odd_addresses,
    compare_units.units,
    compare_units.tiled_units,
    compare_gemm.routing,
    compare_gemm.linears,
    compare_gemm.layers,
    compare_gemm.tiled_layers,
    compare_variants.variants,
    compare_edges.edges,
]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture
def large_tiles(monkeypatch):
    """An operation of the interpreter takes as long for many elements as for few."""
    monkeypatch.setattr(weight_kernels, "WEIGHT_THREADS", 512)
    monkeypatch.setattr(weight_kernels, "WEIGHT_CHUNKS", 1)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_kernels_equal_torch(large_tiles, group):
    checks = list(group("cpu", SHAPES, True))
    failed = [f"{name}: {text}" for name, ok, text in checks if not ok]
    assert checks
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("group", [compare_quantize.tokens, compare_quantize.activations])
def test_many_rows(monkeypatch, group):
    """Rows of 41 and 17 blocks, in three and two chunks of 16."""
    monkeypatch.setattr(row_kernels, "FEW_TILES", 0)
    assert row_kernels.row_tile(1, 656, 0, 4) == row_kernels.Tile(8, 16, 3)
    assert row_kernels.row_tile(1, 272, 0, 4) == row_kernels.Tile(8, 16, 2)
    checks = list(group("cpu", {"chunks": (656, 272, 4, 2)}, True))
    failed = [f"{name}: {text}" for name, ok, text in checks if not ok]
    assert not failed, "\n".join(failed)


def test_ops_run_the_backend_they_name():
    generator = torch.Generator().manual_seed(0)
    w13 = random_weight(4, 96, 160, generator=generator, exact=True)
    w2 = random_weight(4, 160, 48, generator=generator, exact=True)
    x = random_rows(3, 160, generator=generator, exact=True)
    ids = torch.tensor([[0, 3], [1, -1], [3, 2]], dtype=torch.int32)
    router = torch.rand((3, 2), generator=generator)
    weights = (w13.packed, w13.block_scale, w13.global_scale)
    weights += (w2.packed, w2.block_scale, w2.global_scale)
    linear_weights = [tensor[0] for tensor in weights[:3]]
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        plain = moe.grouped_gemm
        patch.setattr(moe, "grouped_gemm", lambda *a, **k: launched.append(1) or plain(*a, **k))
        got, want = (
            quads_moe(x, *weights, router, ids, None, "silu", None, "nvfp4", False, backend)
            for backend in ("triton", "emulated")
        )
    assert len(launched) == 2
    assert torch.equal(got, want)
    got, want = (
        quads_linear(x, *linear_weights, None, "nvfp4", backend)
        for backend in ("triton", "emulated")
    )
    assert torch.equal(got, want)


@triton.jit
def go_on(counter_ptr, PROGRAMS: tl.constexpr):
    """Stands for the barrier, at which programs that run one after the other would wait forever."""


@pytest.mark.parametrize("rows", [10, 32])
@pytest.mark.parametrize("programs", [2, 8])
def test_programs_share_a_unit(monkeypatch, programs, rows):
    """Without the barrier the first launch leaves all maxima, the second quantizes with them."""
    monkeypatch.setattr(_units, "wait_for_all", go_on)
    k, generator = 160, torch.Generator().manual_seed(0)
    w1, w3 = torch.randn((2, rows, k), generator=generator).to(torch.bfloat16)
    w1[-1, -1] = 9.0
    mine = compare_units.make_units((2, 2 * rows, k), ("w1", "w3"), "cpu", True)
    want = compare_units.make_units((2, 2 * rows, k), ("w1", "w3"), "cpu", False)
    gpu = UnitQuantizer(mine.packed, mine.block_scale, mine.global_scale, 2, "pow2", programs)
    gpu.take(1, 1, w1, Piece(rows), stage := mine.stage(1), False)
    for _ in range(2):
        gpu.take(1, 2, w3, Piece(rows, rows), stage, True)
    want.load(1, "w1", w1, "w1", Piece(rows))
    want.load(1, "w3", w3, "w3", Piece(rows, rows))
    same, text = compare_units.same_storage(mine, want)
    assert same, text
    assert gpu.bad_parts([1]) == {}
