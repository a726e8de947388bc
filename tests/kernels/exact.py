"""Inputs whose GEMM results do not depend on the order of summation, and float64 references."""

import torch

from quads_common.format import QuantizedTensor
from quads_common.gemm import accumulation_bound
from quads_common.packing import unscaled_values


def random_weight(
    *shape: int, generator: torch.Generator, device: str | torch.device = "cpu", exact: bool = False
) -> QuantizedTensor:
    """Any code, any finite scale byte: [.., N, K]. exact: scales 1/2 to 2, for exact sums."""
    *lead, n, k = shape

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, device=device).to(torch.uint8)

    packed = integers(0, 256, *lead, n, k // 2)
    if exact:
        block_scale = integers(6, 9, *lead, n, k // 16) * 8  # 0x30, 0x38, 0x40: powers of two
    else:
        block_scale = integers(0, 0x7F, *lead, n, k // 16)
    global_scale = 2.0 ** -integers(3, 9, *lead, 1).float().reshape(lead)
    return QuantizedTensor(packed, block_scale.view(torch.float8_e4m3fn), global_scale)


def random_rows(
    rows: int, k: int, *, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu", exact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Activations [rows, k]. exact: small integers with a row maximum that keeps scales short."""
    if not exact:
        return torch.randn((rows, k), generator=generator, device=device).to(dtype)
    x = torch.randint(-6, 7, (rows, k), generator=generator, device=device)
    x = torch.where(x == 5, 4, x)
    x[:, 0] = 6  # with the maximum 6 every block scale is a power of two or 1.5 times one
    return x.to(dtype)


def weight_operand(weight: QuantizedTensor) -> torch.Tensor:
    """code * block_scale [.., N, K] in float64."""
    return unscaled_values(weight.packed, weight.block_scale).double()


def product_and_bound(
    x: torch.Tensor, w: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x @ w.T) * factor in float64, and how far a float32 accumulation may be off."""
    exact = (x @ w.T) * factor
    bound = accumulation_bound(x.abs() @ w.abs().T, x.shape[-1]) * factor.abs()
    return exact, bound


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest rounding error at float64 ``values`` in ``dtype``."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(min=info.tiny))[1]
    return info.eps * 2.0 ** (exponent.double() - 2)


def worst_excess(
    got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
) -> float:
    """Largest error as a multiple of what is allowed; NaN counts as infinitely wrong.

    Allowed: the accumulation bound, two float32 roundings of the factor and the product, and one
    rounding to ``dtype``.
    """
    allowed = bound + exact.abs() * 2.0**-22
    allowed = allowed + half_ulp(exact.abs() + allowed, dtype)
    ratio = (got.double() - exact).abs() / allowed
    return float(torch.where(ratio.isnan(), torch.inf, ratio).max()) if got.numel() else 0.0


def moe_reference(
    operand: torch.Tensor, row_scale: torch.Tensor, weight: QuantizedTensor, slots: torch.Tensor,
    ids: torch.Tensor, top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One grouped GEMM in float64: exact results and bounds [slots, N]; NaN where ids is -1.

    operand: [rows, K]; row_scale: [rows, 1]; slots: those to compute; ids: local expert per slot.
    """
    shape = (ids.numel(), weight.shape[1])
    exact = torch.full(shape, torch.nan, dtype=torch.float64, device=operand.device)
    bound = torch.zeros_like(exact)
    for expert in ids[slots].unique().tolist():
        if expert < 0:
            continue
        mine = slots[ids[slots] == expert]
        rows = mine // top_k
        one = QuantizedTensor(
            weight.packed[expert], weight.block_scale[expert], weight.global_scale[expert]
        )
        factor = (row_scale[rows] * one.global_scale).double()
        exact[mine], bound[mine] = product_and_bound(
            operand[rows].double(), weight_operand(one), factor
        )
    return exact, bound
