"""Comparisons of kernels on inputs of other layouts with the same on plain ones; empty inputs.

Yields as ``compare_quantize`` does.
"""

from collections.abc import Iterator

import torch

from quads_common.activation import Activation
from quads_common.compensation.operands import InputCompensation
from quads_common.format import QuantizedTensor
from quads_common.gemm import linear
from quads_common.kernels.compensated import (
    fused_moe_compensated_triton,
    linear_compensated_triton,
)
from quads_common.kernels.compensated_rows import CompensatedRows, compensate_rows
from quads_common.kernels.gemm import linear_triton
from quads_common.kernels.moe import fused_moe_triton
from quads_common.kernels.quantize import quantize_triton, quantize_weight_into
from quads_common.kernels.rows import Operand, QuantizedRows, quantize_rows
from tests.kernels.compensated_cases import PRESETS, hot_rows
from tests.kernels.exact import random_rows, random_weight

Check = tuple[str, bool, str]


def tensors_of(result) -> list[torch.Tensor]:
    """The tensors of a result, those of results in it too."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, QuantizedTensor):
        return [result.packed, result.block_scale, result.global_scale]
    if isinstance(result, QuantizedRows | CompensatedRows | Operand):
        return [t for value in vars(result).values() for t in tensors_of(value)]
    return []


def same_bytes(got, want) -> tuple[bool, str]:
    """Whether two results hold as many tensors, of the same bytes."""
    both = tensors_of(got), tensors_of(want)
    wrong = [
        i
        for i, (a, b) in enumerate(zip(*both, strict=True))
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    ]
    return bool(both[0]) and not wrong, f"{len(both[0])} tensors, differ: {wrong}"


def in_other_layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of x [rows, K] behind other strides, up to the last byte of their memory."""
    rows, width = x.shape
    apart = torch.full((rows, width + 24), torch.nan, dtype=x.dtype, device=x.device)
    columns = torch.full((rows, 2 * width), torch.nan, dtype=x.dtype, device=x.device)
    return {
        "rows apart": apart[:, 24:].copy_(x),
        "columns apart": columns[:, 1::2].copy_(x),
        "transposed": x.T.contiguous().T,
    }


def edges(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator().manual_seed(61)
    x = hot_rows(5, hidden, generator, torch.bfloat16).to(device)
    y = random_rows(5, 2 * inner, generator=generator).to(device)
    factor = torch.rand(5, generator=generator).to(device)
    lists = PRESETS["splice rac"].lists(hidden, 1, 4, device)
    gated = Activation()
    yield from row_layouts(x, y, factor, lists, gated)
    yield from no_rows(x, y, lists, gated)
    yield from weight_layouts(hidden, inner, generator, device)
    n, k = 50, hidden
    weight = random_weight(n, k, generator=torch.Generator(device).manual_seed(1), device=device)
    for layout, moved in in_other_layouts(x).items():
        want = linear_triton(x, weight)
        yield f"linear {layout}", *same_bytes(linear_triton(moved, weight), want)
    none = linear_triton(x[:0], weight)
    yield "linear of no rows", none.shape == (0, n), str(list(none.shape))
    bias = torch.randn(n, generator=generator).to(device, torch.bfloat16)
    empty = quantize_triton(torch.empty((n, 0), dtype=torch.bfloat16, device=device))
    for given in (None, bias):
        want = linear(x[:, :0], empty, given)
        for got in (
            linear_triton(x[:, :0], empty, given),
            linear_compensated_triton(x[:, :0], empty, given, compensation=InputCompensation()),
        ):
            yield "linear without channels", *same_bytes(got, want)
    yield from no_tokens(x[:0], hidden, inner, experts, top_k, device)


def row_layouts(x, y, factor, lists, gated) -> Iterator[Check]:
    """Every output of the quantizers at once, and the forms that only some callers ask for."""
    forms = {
        "rows": (x, lambda v: quantize_rows(v, packed=True, row_factor=factor)),
        "W4A16 rows": (x, lambda v: quantize_rows(v, quantized=False)),
        "gated": (y, lambda v: quantize_rows(v, activation=gated, packed=True, product=True)),
        "folded": (x, lambda v: compensate_rows(v, lists, row_factor=factor)),
        "exact": (x, lambda v: compensate_rows(v, lists, exact=True, packed=True)),
        "codes and hot values": (
            x, lambda v: compensate_rows(v, lists, operand=False, packed=True),
        ),
    }  # fmt: skip
    for name, (plain, form) in forms.items():
        want = form(plain)
        for layout, moved in in_other_layouts(plain).items():
            yield f"{name}, {layout}", *same_bytes(form(moved), want)


def no_rows(x, y, lists, gated) -> Iterator[Check]:
    for name, result in {
        "rows": quantize_rows(x[:0], packed=True),
        "gated": quantize_rows(y[:0], activation=gated, product=True),
        "folded": compensate_rows(x[:0], lists),
        "exact": compensate_rows(x[:0], lists, exact=True, packed=True),
    }.items():
        shapes = [list(t.shape) for t in tensors_of(result)]
        ok = bool(shapes) and all(0 in shape for shape in shapes)
        yield f"no rows, {name}", ok, str(shapes)


def weight_layouts(hidden: int, inner: int, generator, device: str) -> Iterator[Check]:
    """Weights with strides, into storage with strides, whose gaps stay as they were."""
    w = (torch.randn((3, inner + 5, hidden), generator=generator) * 0.02).to(torch.bfloat16)
    w = w.to(device)
    want = quantize_triton(w)
    gaps = torch.full((3, inner + 7, hidden + 16), torch.nan, dtype=w.dtype, device=device)
    views = {
        "rows and matrices apart": gaps[:, : inner + 5, :hidden].copy_(w),
        "transposed": w.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for layout, view in views.items():
        yield f"weight, {layout}", *same_bytes(quantize_triton(view), want)
    rows = inner + 5
    packed = torch.full((3, rows + 1, hidden // 2 + 3), 0xA5, dtype=torch.uint8, device=device)
    scale = torch.full((3, rows + 1, hidden // 16 + 3), 0x5A, dtype=torch.uint8, device=device)
    total = torch.zeros(3, device=device)
    inside = packed[:, :rows, : hidden // 2], scale[:, :rows, : hidden // 16]
    quantize_weight_into(w, inside[0], inside[1].view(torch.float8_e4m3fn), total)
    got = QuantizedTensor(inside[0], inside[1].view(torch.float8_e4m3fn), total)
    ok, text = same_bytes(got, want)
    for tensor, part, gap in ((packed, inside[0], 0xA5), (scale, inside[1], 0x5A)):
        part.fill_(gap)
        ok &= bool((tensor == gap).all())
    yield "weight into storage with gaps", ok, text


def no_tokens(x, hidden: int, inner: int, experts: int, top_k: int, device) -> Iterator[Check]:
    generator = torch.Generator(device).manual_seed(2)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    router = torch.empty((0, top_k), device=device)
    ids = torch.empty((0, top_k), dtype=torch.int32, device=device)
    nothing = {"w13_input": InputCompensation(), "w2_input": InputCompensation()}
    for name, out in {
        "plain": fused_moe_triton(x, w13, w2, router, ids),
        "compensated": fused_moe_compensated_triton(x, w13, w2, router, ids, **nothing),
    }.items():
        yield f"no tokens, {name}", out.shape == (0, hidden), str(list(out.shape))
