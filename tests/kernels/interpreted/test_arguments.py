"""What the kernels' entry points refuse: they read memory by the shapes that they expect."""

from dataclasses import replace

import pytest
import torch

from quads_common.activation import Activation
from quads_common.compensation.fold import linear_folded
from quads_common.compensation.linear import linear_compensated
from quads_common.compensation.moe import fused_moe_compensated
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.staging import Staging, new_staging
from quads_common.gemm import linear
from quads_common.kernels.blackwell.linear import linear_blackwell
from quads_common.kernels.blackwell.moe import fused_moe_blackwell
from quads_common.kernels.compensated import (
    fused_moe_compensated_triton,
    linear_compensated_triton,
)
from quads_common.kernels.compensated_gemm import compensated_gemm
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.gemm import GemmConfig, grouped_gemm, linear_triton
from quads_common.kernels.moe import fused_moe_triton
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import fused_moe, local_expert_ids
from tests.kernels.compensated_cases import Preset
from tests.kernels.exact import random_rows, random_weight

HIDDEN, INNER, EXPERTS = 64, 32, 3
NONE = InputCompensation()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def layer(generator):
    """x, w13, w2, the router's weights and ids."""
    w13 = random_weight(EXPERTS, 2 * INNER, HIDDEN, generator=generator, exact=True)
    w2 = random_weight(EXPERTS, HIDDEN, INNER, generator=generator, exact=True)
    x = random_rows(4, HIDDEN, generator=generator, exact=True)
    ids = torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1]], dtype=torch.int32)
    return x, w13, w2, torch.rand((4, 2), generator=generator), ids


def error_of(function, *arguments, **options) -> tuple[type, str]:
    with pytest.raises((ValueError, TypeError)) as raised:
        function(*arguments, **options)
    return raised.type, str(raised.value)


@pytest.mark.parametrize("shape", [(1,), (7,), (24, 1), (1, 24), (48,), ()], ids=str)
def test_linears_take_no_bias_of_another_shape(generator, shape):
    weight = random_weight(24, HIDDEN, generator=generator)
    x, bias = random_rows(3, HIDDEN, generator=generator), torch.ones(shape)
    want = (ValueError, f"bias must be [24], got {list(shape)}")
    assert error_of(linear, x, weight, bias) == want
    assert error_of(linear_triton, x, weight, bias) == want
    for compensated_linear in (linear_compensated, linear_compensated_triton, linear_folded):
        assert error_of(compensated_linear, x, weight, bias, compensation=NONE) == want
    assert error_of(linear_blackwell, x, weight, bias) == want


@pytest.mark.parametrize("name, n", [("w13_bias", 2 * INNER), ("w2_bias", HIDDEN)])
def test_layers_take_no_bias_of_another_shape(layer, name, n):
    lists = {"w13_input": NONE, "w2_input": NONE}
    for shape in ((EXPERTS, n // 2), (n,), (1, n), (EXPERTS + 1, n), (EXPERTS, n, 1), (EXPERTS,)):
        bias = {name: torch.ones(shape)}
        want = (ValueError, f"{name} must be {[EXPERTS, n]}, got {list(shape)}")
        assert error_of(fused_moe, *layer, **bias) == want
        assert error_of(fused_moe_triton, *layer, **bias) == want
        for compensated_layer in (fused_moe_compensated, fused_moe_compensated_triton):
            assert error_of(compensated_layer, *layer, **bias, **lists) == want
        assert error_of(fused_moe_blackwell, *layer, **bias) == want


@pytest.mark.parametrize("columns", [False, True], ids=["plain", "columns"])
def test_gemms_take_no_operands_of_another_shape(layer, columns):
    """Plain and compensated ones share the checks."""
    x, w13, _, router, ids = layer
    table, config = make_table(Routes(ids, None, EXPERTS), 16), GemmConfig(16, 64, 128)
    arguments: dict = {
        "weight": w13,
        "y": torch.empty((8, 2 * INNER), dtype=x.dtype),
        "config": config,
        "table": table,
        "top_k": 2,
    }
    lists = Preset(channels=16, columns=True).lists(HIDDEN, 1, 2 * INNER, "cpu")
    lists = replace(lists, columns=lists.columns.expand(EXPERTS, -1, -1).contiguous())
    one = replace(w13, global_scale=w13.global_scale.repeat_interleave(2)[::2])

    def refuse(message, **changes):
        options = arguments | changes
        weight, y = options.pop("weight"), options.pop("y")
        with pytest.raises(ValueError, match=message):
            if columns:
                compensated_gemm(compensate_rows(x, lists), lists, weight, y, **options)
            else:
                grouped_gemm(quantize_rows(x).operand, weight, y, **options)

    refuse(r"bias must be \[3, 64\], got \[64\]", bias=torch.ones(64))
    refuse(r"y must be \[8, 64\], got \[4, 64\]", y=arguments["y"][:4])
    refuse(r"y must be \[4, 64\], got \[8, 64\]", top_k=1)
    refuse(r"y must be \[8, 64\], got \[8, 32\]", y=arguments["y"][:, :32])
    refuse(r"router_weight must be \[8\], got \[3, 2\]", router_weight=router[:3])
    refuse(r"router_weight must be contiguous", router_weight=torch.rand((2, 4)).T)
    refuse(r"y must be contiguous", y=torch.empty((64, 8)).T)
    refuse(r"global_scale must be contiguous, has strides \[2\]", weight=one)
    refuse(r"a routing table is needed for 3 experts", table=None)
    refuse(r"the table has blocks of 16, the tile 32", config=replace(config, block_m=32))


@pytest.mark.parametrize(
    "slots",
    [torch.zeros((3, 16)), torch.zeros(4), torch.zeros((16, 4)).T, torch.zeros((4, 16)).half()],
    ids=["rows", "dimensions", "strides", "dtype"],
)
def test_sums_of_slots_that_do_not_fit(slots):
    routes = Routes(torch.zeros((2, 2), dtype=torch.int32), None, 2)
    with pytest.raises(ValueError, match=r"slots must be contiguous float32 \[4, H\], got torch"):
        sum_slots_triton(slots, routes, torch.float32)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_m": 0}, "block_m must be a power of two of at least 16, got 0"),
        ({"block_m": -16}, "block_m must be a power of two of at least 16, got -16"),
        ({"block_n": 48}, "block_n must be a power of two of at least 16, got 48"),
        ({"block_n": 8}, "block_n must be a power of two of at least 16, got 8"),
        ({"block_k": 64}, "block_k must be 128 or 256, got 64"),
        ({"warps": 3}, "warps must be a power of two of at least 1, got 3"),
        ({"warps": 0}, "warps must be a power of two of at least 1, got 0"),
        ({"stages": 0}, "stages must be at least 1, got 0"),
    ],
    ids=str,
)
def test_tiles_are_powers_of_two(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        GemmConfig(**{"block_m": 16, "block_n": 64, "block_k": 128, **changes})


@pytest.mark.parametrize("block_m", [0, -1, 24])
def test_tables_have_blocks_of_powers_of_two(block_m):
    routes = Routes(torch.zeros((2, 1), dtype=torch.int32), None, 2)
    with pytest.raises(ValueError, match=f"block_m must be a power of two .*, got {block_m}"):
        make_table(routes, block_m)


def test_layers_read_tensors_with_strides(layer):
    """Ids, the router's weights, the expert map and biases between other values."""
    x, w13, w2, router, ids = layer
    expert_map = torch.tensor([2, 0, -1, 1, -1], dtype=torch.int32)
    biases = [torch.randn((EXPERTS, n)) for n in (2 * INNER, HIDDEN)]
    apart = [
        torch.stack((t, torch.ones_like(t)), -1)[..., 0]
        for t in (router, ids + 1, expert_map, *biases)
    ]
    assert not any(t.is_contiguous() for t in apart)
    names = ("expert_map", "w13_bias", "w2_bias")
    options = dict(zip(names, (expert_map, *biases), strict=True))
    want = fused_moe(x, w13, w2, router, ids + 1, **options)
    options = dict(zip(names, apart[2:], strict=True))
    assert torch.equal(fused_moe_triton(x, w13, w2, *apart[:2], **options), want)
    got = fused_moe_compensated_triton(
        x, w13, w2, *apart[:2], w13_input=NONE, w2_input=NONE, **options
    )
    assert torch.equal(got, want)


def test_routes_name_what_they_do_not_take():
    ids = torch.zeros((2, 2), dtype=torch.int32)
    expert_map = torch.zeros(4, dtype=torch.int32)
    for arguments, error in (
        ((ids[0], None), (ValueError, "topk_ids must be [T, k], got [2]")),
        ((ids, ids), (ValueError, "expert_map must be [global experts], got [2, 2]")),
        ((ids, expert_map.long()), (TypeError, "expert_map must be int32, got torch.int64")),
        (
            (ids, expert_map.to("meta")),
            (ValueError, "expert_map is on meta, topk_ids on cpu"),
        ),
    ):
        assert error_of(Routes, *arguments, 4) == error
    kind, message = error_of(Routes, ids.float(), None, 4)
    assert kind is TypeError
    assert message.startswith("topk_ids must be one of ['torch.int32', 'torch.int64', ")
    assert message.endswith(", got torch.float32")


@pytest.mark.parametrize("mapped", [False, True], ids=["local", "mapped"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_no_expert_are_skipped(layer, mapped, dtype):
    """Of 64 bits too, whose lower half would name one."""
    x, w13, w2, router, ids = layer
    ids, none = ids.to(dtype), ids.clone()
    far = [EXPERTS, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        far += [2**32, 1 - 2**32]
    for i, value in enumerate(far):
        ids[i % 4, i // 4], none[i % 4, i // 4] = value, -1
    # What lies behind the map names an expert.
    expert_map = torch.arange(2 * EXPERTS, dtype=torch.int32)[:EXPERTS] if mapped else None
    assert (local_expert_ids(ids, expert_map)[none < 0] == -1).all() or not mapped
    want = fused_moe(x, w13, w2, router, none)
    for layer_of in (fused_moe, fused_moe_triton):
        assert torch.equal(layer_of(x, w13, w2, router, ids, expert_map=expert_map), want)


ROWS, GATED = torch.zeros((4, 64)), Activation()


def quantized(x, **options):
    return quantize_rows(x, **options)


def compensated(x, **options):
    return compensate_rows(x, NONE, **options)


@pytest.mark.parametrize("rows_of", [quantized, compensated])
@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.zeros((2, 4, 64)), {}, r"x must be \[rows, K\], got \[2, 4, 64\]"),
        (torch.zeros(64), {}, r"x must be \[rows, K\], got \[64\]"),
        (torch.zeros(()), {}, r"x must be \[rows, K\], got \[\]"),
        (
            torch.zeros((4, 65)), {"activation": GATED},
            r"x must be \[rows, 2 \* K\] for silu, got \[4, 65\]",
        ),
        (torch.zeros((4, 40)), {}, r"activations \[4, 40\]: K = 40 is not a multiple of 16"),
        (torch.zeros((1, 65552)), {}, "rows of 65552 elements are too long: at most 65536"),
        (ROWS, {"row_factor": torch.ones(3)}, r"row_factor must be \[4\] or \[4, 1\].*got .*\[3\]"),
        (ROWS, {"row_factor": torch.ones(1)}, r"row_factor must be .*got .*\[1\]"),
        (ROWS, {"row_factor": torch.ones((1, 4))}, r"row_factor must be .*got .*\[1, 4\]"),
        (ROWS, {"row_factor": torch.ones(8)[::2]}, r"row_factor must be .*with strides \[2\]"),
        (ROWS, {"row_factor": torch.ones(4).long()}, r"row_factor must be .*got torch\.int64"),
        (ROWS, {"row_factor": torch.ones(4).to("meta")}, r"row_factor must be .* on meta$"),
        (ROWS, {"row_factor": torch.ones(4), "activation": GATED}, "not to an activation"),
        (
            ROWS, {"routes": Routes(torch.zeros((1, 3), dtype=torch.int32), None, 2)},
            r"routes must have 4 slots, one for each row of x, got topk_ids \[1, 3\]",
        ),
        (
            ROWS, {"routes": Routes(torch.zeros((3, 2), dtype=torch.int32), None, 2)},
            r"routes must have 4 slots, one for each row of x, got topk_ids \[3, 2\]",
        ),
    ],
)  # fmt: skip
def test_quantizers_name_what_does_not_fit(rows_of, x, options, message):
    with pytest.raises(ValueError, match=message):
        rows_of(x, **options)


@pytest.mark.parametrize("rows_of", [quantized, compensated])
def test_rows_of_no_elements_have_a_scale(rows_of):
    assert rows_of(torch.zeros((3, 0))).operand.row_scale.tolist() == [1.0] * 3


def test_staged_rows_are_contiguous_and_of_the_inputs_dtype():
    rows, groups = new_staging(2, 1, 64, ROWS.dtype)
    sample_map = torch.zeros(8, dtype=torch.int32)
    for changes, message in (
        ({"sample_map": sample_map[::2]}, r"sample_map must be contiguous .*strides \[2\]"),
        ({"rows": rows.half()}, "staged rows must be contiguous torch.float32, got torch.float16"),
        ({"rows": torch.zeros((2, 128))[:, ::2]}, r"staged rows must be .*strides \[128, 2\]"),
        ({"groups": groups.long()}, "staged groups must be .*int32, got torch.int64"),
    ):
        staging = replace(Staging(sample_map[:4], rows, groups), **changes)
        with pytest.raises(ValueError, match=message):
            compensated(ROWS, staging=staging)
