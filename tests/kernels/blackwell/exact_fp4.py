"""float64 results of compensated products and how far a legal float32 computation may be off."""

import torch

from quads_common.compensation.operands import InputCompensation, Operands, compensated_operands
from quads_common.format import QuantizedTensor
from quads_common.gemm import accumulation_bound
from tests.kernels.exact import half_ulp, weight_operand

ROUNDING = 2.0**-24  # float32, relative


def one_matrix(w: QuantizedTensor, expert: int) -> QuantizedTensor:
    return QuantizedTensor(w.packed[expert], w.block_scale[expert], w.global_scale[expert])


def product_and_bound(
    operands: Operands, w: QuantizedTensor, columns: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``operands.product`` in float64 [M, N], and its bound: sums, then float32 roundings.

    Products and sums: ``accumulation_bound`` of all terms that may share an accumulator. Then at
    most four roundings of each addend (alpha, row scale, global scale, their product) and two of
    the sum, every one relative to what it rounds.
    """
    values, k = weight_operand(w), w.shape[-1]
    q = operands.quantized.double()
    scale = operands.row_scale.double() * w.global_scale.double()
    acc, size, terms = q @ values.T, q.abs() @ values.T.abs(), k
    if operands.residual is not None:
        r = operands.alpha * operands.residual.double()
        acc, size, terms = acc + r @ values.T, size + r.abs() @ values.T.abs(), 2 * k
    exact = acc * scale
    bound = (accumulation_bound(size, terms) + 4 * ROUNDING * size) * scale
    if operands.hot is not None and operands.hot.shape[1]:
        hot_scale = torch.ones((), dtype=torch.float64)
        hot_values = columns
        if columns is None:
            hot_scale = w.global_scale.double()
            hot_values = values[:, operands.channels.clamp(min=0).long()]
        hot, hot_values = operands.hot.double(), hot_values.double()
        size = (hot.abs() @ hot_values.T.abs()) * hot_scale
        exact = exact + (hot @ hot_values.T) * hot_scale
        bound = bound + accumulation_bound(size, hot.shape[1]) + 4 * ROUNDING * size
    return exact, bound + 2 * ROUNDING * exact.abs()


def grouped(
    x: torch.Tensor, lists: InputCompensation, w: QuantizedTensor, ids: torch.Tensor, top_k: int,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One grouped GEMM in float64: results and bounds [slots, N]; NaN where ``ids`` has -1.

    x: [slots / top_k, K]. ids: [slots] local experts.
    """
    exact = torch.full((ids.numel(), w.shape[1]), torch.nan, dtype=torch.float64, device=x.device)
    bound = torch.zeros_like(exact)
    sizes = [len(g) for g in (lists.block_mask, lists.channels) if g is not None]
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        mine = (ids == expert).nonzero().flatten()
        group = expert if max(sizes, default=1) > 1 else 0
        operands = compensated_operands(x[mine // top_k], lists, group)
        columns = None if lists.columns is None else lists.columns[expert]
        exact[mine], bound[mine] = product_and_bound(operands, one_matrix(w, expert), columns)
        if bias is not None:
            exact[mine] += bias[expert].double()
            bound[mine] += ROUNDING * (exact[mine].abs() + bias[expert].double().abs())
    return exact, bound


def excess(
    got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
) -> float:
    """Largest error as a multiple of the bound and one rounding to ``dtype``; NaN is infinite."""
    allowed = bound + half_ulp(exact.abs() + bound, dtype)
    ratio = (got.double() - exact).abs() / allowed
    return float(torch.where(ratio.isnan(), torch.inf, ratio).max()) if got.numel() else 0.0
