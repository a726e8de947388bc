"""What the CUDA C++ kernels are handed: addresses of tensors as they read them, or an error."""

from dataclasses import replace

import pytest
import torch

from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor
from quads_common.kernels import hopper
from quads_common.kernels.hopper import DecodePlan
from quads_common.kernels.hopper_arguments import Inspection, RowCompensation, moe_arguments
from quads_common.kernels.hopper_columns import HotColumns
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import Operand

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 3, 2, 4, 384, 128
SLOTS = TOKENS * TOP_K


def zeros(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def weight(rows: int, k: int, experts: int = EXPERTS) -> QuantizedTensor:
    return QuantizedTensor(
        zeros(experts, rows, k // 2, dtype=torch.uint8),
        zeros(experts, rows, k // 16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        zeros(experts),
    )


def bf16(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.bfloat16)


def int32(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def call() -> dict:
    """A call with everything that there can be; H is padded to 512 in planes."""
    return {
        "operand": Operand(zeros(TOKENS, 8, 64, dtype=torch.float16), zeros(TOKENS), HIDDEN),
        "w13": weight(2 * INNER, HIDDEN),
        "w2": weight(HIDDEN, INNER),
        "routes": Routes(int32(TOKENS, TOP_K), int32(9), EXPERTS),
        "router": zeros(TOKENS, TOP_K),
        "compensation": RowCompensation(
            zeros(EXPERTS, INNER // 16, dtype=torch.bool), int32(1, INNER // 16), 0.5
        ),
        "staging": Staging(int32(TOKENS), bf16(4 * TOP_K, INNER), int32(4 * TOP_K)),
        "columns": HotColumns(
            bf16(EXPERTS, 2 * INNER, 16), bf16(TOKENS, 16), bf16(EXPERTS, HIDDEN, 32),
            int32(EXPERTS, 32),
        ),
        "inspection": None,
    }  # fmt: skip


def inspected() -> Inspection:
    planes = (SLOTS, 8, INNER // 8)
    operand = zeros(*planes, dtype=torch.float16)
    return Inspection(bf16(SLOTS, 2 * INNER), bf16(*planes), operand, zeros(SLOTS))


def arguments(given: dict):
    out, product = zeros(SLOTS, HIDDEN), bf16(SLOTS, INNER)
    return moe_arguments(**given, rows=8, spread=132, limit=None, out=out, product=product)


def test_pointers_and_sizes():
    given = call()
    found = arguments(given)
    pointers = {
        "w13": given["w13"].packed, "w13_scale": given["w13"].block_scale,
        "w13_global": given["w13"].global_scale, "w2": given["w2"].packed,
        "w2_scale": given["w2"].block_scale, "w2_global": given["w2"].global_scale,
        "x": given["operand"].values, "row_scale": given["operand"].row_scale,
        "router": given["router"], "sample_map": given["staging"].sample_map,
        "staged_rows": given["staging"].rows, "staged_groups": given["staging"].groups,
    }  # fmt: skip
    assert {n: getattr(found, n) for n in pointers} == {
        n: t.data_ptr() for n, t in pointers.items()
    }
    routes, lists, columns = found.routes, found.compensation, found.columns
    assert (routes.ids, routes.expert_map) == (
        given["routes"].topk_ids.data_ptr(),
        given["routes"].expert_map.data_ptr(),
    )
    sizes = (routes.map_size, routes.experts, routes.slots, routes.top_k, routes.wide)
    assert sizes == (9, EXPERTS, SLOTS, TOP_K, 0)
    assert (routes.rows, routes.spread, found.limit) == (8, 132, float("inf"))
    assert (lists.mask_stride, lists.bits_stride, lists.alpha) == (INNER // 16, 0, 0.5)
    assert columns.channels_stride == 32
    assert columns.w2 == given["columns"].w2.data_ptr()


def test_what_may_be_absent():
    given = dict.fromkeys(call()) | {name: call()[name] for name in ("w13", "w2")}
    given["operand"] = Operand(bf16(TOKENS, 8, 64), None, HIDDEN)
    given["routes"] = Routes(zeros(TOKENS, TOP_K, dtype=torch.int64), None, EXPERTS)
    found = arguments(given)
    assert (found.routes.wide, found.routes.map_size) == (1, 0)
    for name in ("row_scale", "router", "sample_map", "inspect_y"):
        assert getattr(found, name) is None
    assert arguments(call() | {"inspection": inspected()}).inspect_y is not None


def changed(name: str, field: str, tensor) -> dict:
    return {name: replace(call()[name], **{field: tensor})}


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and values, not contiguous."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


TENSORS = {
    "router": ("router", None),
    "row_scale": ("operand", "row_scale"),
    "w13.packed": ("w13", "packed"),
    "w13.block_scale": ("w13", "block_scale"),
    "w13.global_scale": ("w13", "global_scale"),
    "w2.packed": ("w2", "packed"),
    "w2.block_scale": ("w2", "block_scale"),
    "w2.global_scale": ("w2", "global_scale"),
    "block_mask": ("compensation", "block_mask"),
    "hot_bits": ("compensation", "hot_bits"),
    "sample_map": ("staging", "sample_map"),
    "staged_rows": ("staging", "rows"),
    "staged_groups": ("staging", "groups"),
    "hot": ("columns", "hot"),
    "w2 columns": ("columns", "w2"),
    "channels": ("columns", "channels"),
}


@pytest.mark.parametrize("change", [elsewhere, every_second])
@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_contiguous_and_on_one_device(name, change):
    argument, field = TENSORS[name]
    given = call()
    if field is None:
        given[argument] = change(given[argument])
    else:
        tensor = getattr(given[argument], field)
        given |= changed(argument, field, change(tensor))
    with pytest.raises(ValueError, match=rf"^{name} must be .*, contiguous, on cpu, got"):
        arguments(given)


def test_routes_are_on_the_device_of_the_rest():
    """``Routes`` itself copies what is not contiguous, and holds both tensors on one device."""
    routes = call()["routes"]
    assert routes.expert_map is not None
    routes = Routes(elsewhere(routes.topk_ids), elsewhere(routes.expert_map), EXPERTS)
    with pytest.raises(ValueError, match=r"^topk_ids must be .*, contiguous, on cpu, got"):
        arguments(call() | {"routes": routes})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"router": zeros(TOKENS, TOP_K, dtype=torch.float64)}, "router must be torch.float32"),
        ({"router": zeros(SLOTS)}, r"router must be torch.float32 \[3, 2\]"),
        ({"w13": weight(2 * INNER, HIDDEN, 3)}, r"w13.packed must be torch.uint8 \[4, 256, 192\]"),
        ({"w13": weight(INNER, HIDDEN)}, r"w13.packed must be torch.uint8 \[4, 256, 192\]"),
        (
            changed("w2", "global_scale", zeros(EXPERTS, HIDDEN, 1)),
            r"w2.global_scale must .* \[4\]",
        ),
        (changed("operand", "values", zeros(TOKENS, 8, 64)), "operand must be float16 or bfloat16"),
        (changed("operand", "values", bf16(TOKENS, 8, 64)), "float16 has row scales"),
        (changed("operand", "row_scale", None), "float16 has row scales"),
        (
            changed("operand", "values", zeros(TOKENS, 8, 48, dtype=torch.float16)),
            r"operand must be torch.float16 \[3, 8, 64\]",
        ),
        (changed("routes", "num_experts", 5), "routes to 5 experts, w2 has 4"),
        (changed("compensation", "block_mask", int32(1, 8)), "block_mask must be torch.bool"),
        (changed("compensation", "hot_bits", int32(2, 8)), r"hot_bits must .* \[4, 8\]"),
        (
            changed("compensation", "block_mask", zeros(9, dtype=torch.bool)[1:].view(1, 8)),
            "block_mask must lie at a multiple of 4",
        ),
        (changed("staging", "groups", int32(7)), "7 staged rows are not 2 for each place"),
        (changed("staging", "rows", zeros(8, INNER)), "staged_rows must be torch.bfloat16"),
        (
            {"inspection": replace(inspected(), row_scale=zeros(SLOTS + 1))},
            r"row_scale must be torch.float32 \[6\]",
        ),
    ],
)
def test_what_the_kernels_would_misread_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        arguments(call() | change)


def test_dtypes_of_routes():
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64"):
        arguments(call() | changed("routes", "topk_ids", int32(TOKENS, TOP_K).short()))
    with pytest.raises(TypeError, match="expert_map must be int32, got"):
        arguments(call() | changed("routes", "expert_map", int32(9).long()))


def test_an_operand_on_the_host_is_refused():
    given = call()
    operands = (given[name] for name in ("operand", "w13", "w2", "routes", "router"))
    with pytest.raises(ValueError, match="needs tensors on a CUDA device, got cpu"):
        hopper.decode_experts(*operands, DecodePlan("few", 8), None)
